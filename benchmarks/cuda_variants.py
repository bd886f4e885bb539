"""Variants of the CUDA kernels, built without a GPU and timed on one: what a change of shape or schedule would give.

    python benchmarks/cuda_variants.py build FOLDER [NAME ...]    compile (scripts/build-kernels fetches the compiler)
    python benchmarks/cuda_variants.py emulate FOLDER [NAME ...]  prove on this CPU, small
    python benchmarks/cuda_variants.py run FOLDER [NAME ...]      prove and time on an H200; DeepSeek-V4-Flash, MXFP4
    python benchmarks/cuda_variants.py once FOLDER NAME TOKENS    two calls and nothing else, for a profiler

A variant is the kernels' own sources with a few words exchanged and another tile. ``run`` compares each with the
reference before it is timed, and prints microseconds: of the whole layer, and of its launches up to the first, the
second and the third. Names with ``pipeline`` (stages are filled, nothing is multiplied) and ``math`` (the other way
round) are lower bounds for the others, and their results are wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.reference import emulate_activations
from polymoe.bench.timing import TimedCalls, distinct_calls
from polymoe.formats import FORMATS
from polymoe.kernels.cuda import build as kernel_build
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Module
from polymoe.kernels.cuda.modules import kernel as shipped_kernel
from polymoe.kernels.cuda.pipelines import CtaTile
from polymoe.kernels.cuda.spec import W4A8, W4A8_ROWS, W4A8_ROWS_FAST, W4A16_MMA, W4A16_WGMMA, KernelFamily
from polymoe.kernels.cuda.targets import SM90, Target
from polymoe.layouts import LAYOUTS, Packed
from polymoe.layouts.cuda import w4a8_fragments
from polymoe.layouts.cuda.w4a16_fragments import pack_scales
from polymoe.problem import Problem
from polymoe.problem.activations import SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights

TOLERANCE, FAST_TOLERANCE = 5e-3, 2e-2
"""Most error of a proven variant: of one like the kernels for users, and of one that sums all of K in tensor cores."""

Changes = tuple[tuple[str, str, str], ...]
"""File, what stands there once, and what to put there."""

UNROLLED: Changes = (("gemm/w4a16_wgmma.cuh", "N_BLOCKS == 1 ? K_BLOCKS : 1;", "K_BLOCKS;"),)
"""Stages of several blocks of rows unrolled."""

_NO_MMA = """            for (int m = 0; m < N_BLOCKS; ++m) {
                for (int i = 0; i < BLOCK_M / 2; ++i) acc[m][i] = 0.0f;
            }
            for (int k = 0; k < args.k; k += 64 * K_BLOCKS) {
                pipeline.wait_full();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(pipeline.empty_barrier());
                pipeline.advance();
            }
"""
PIPELINE: Changes = (
    (
        "gemm/w4a16_wgmma.cuh",
        "            mainloop.template run<WIDTHS...>(tile.rows);\n",
        _NO_MMA,
    ),
)
PIPELINE_E4M3: Changes = (
    (
        "gemm/w4a8.cuh",
        """        W4a8Mainloop<WARPGROUPS, N_BLOCKS, BLOCK_M, K_BLOCKS>(acc, args, pipeline, ping_pong, tile.rows,
                                                              smem_address(scratch))
            .template run<WIDTHS...>(tile.rows);
""",
        _NO_MMA,
    ),
)
_COPY = "__device__ __forceinline__ void bulk_copy_g2s"
MATH: Changes = (
    ("gemm/w4_producer.cuh", "mbarrier_arrive_expect_tx(barrier, bytes);", "mbarrier_arrive(barrier);"),
    (
        "ptx/async_copy.cuh",
        f"{_COPY}(uint32_t smem,",
        f"{_COPY}(uint32_t, const void*, uint32_t, uint32_t) {{}}\n\n{_COPY}_really(uint32_t smem,",
    ),
)
PING_PONG: Changes = (("gemm/w4a8.cuh", "kPingPong = BLOCK_M > 64;", "kPingPong = true;"),)
NO_PING_PONG: Changes = (("gemm/w4a8.cuh", "kPingPong = BLOCK_M > 64;", "kPingPong = false;"),)
"""Whether warpgroups alternate at the tensor cores."""


def _promoted(columns: int) -> Changes:
    """So many columns are added up in the tensor cores."""
    return (("gemm/w4a8_rows.cuh", "kPromoted = 256;", f"kPromoted = {columns};"),)


_MAGNITUDES = """// Right up to step 11, below which E4M3 is subnormal, and for step 15 of zeros.
__device__ __forceinline__ uint2 e2m1_magnitudes(uint32_t offset) {
    return make_uint2(0x6C686000u - offset * 0x01010100u, 0x7C787470u - offset * 0x01010101u);
}

"""
COMPUTED: Changes = (
    ("gemm/w4a8_rows.cuh", "// How a format's codes become", f"{_MAGNITUDES}// How a format's codes become"),
    *(
        (
            "gemm/w4a8_rows.cuh",
            f"ld_shared_v2(lut + extract_byte<{part}>(offsets));",
            f"e2m1_magnitudes(extract_byte<{part}>(offsets));",
        )
        for part in ("HALF * 2", "HALF * 2 + 1")
    ),
)
"""Magnitudes are computed, not looked up."""
MULTIPLIED: Changes = (
    ("dequant/fp4.cuh", "    a[1] = (word << 4) & mask;\n", "    a[1] = (word * powers[0]) & mask;\n"),
    ("dequant/fp4.cuh", "((word << 6) & 0x80C080C0u)", "((word * powers[2]) & 0x80C080C0u)"),
    (
        "dequant/fp4.cuh",
        "// Eight E2M1 codes to bfloat16, times",
        "__constant__ uint32_t powers[3] = {16, 1024, 64};\n\n// Eight E2M1 codes to bfloat16, times",
    ),
)
"""Two of the shifts as multiplications."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A tile of a kernel family, the changes, and tokens to time it with. Tiles of w4a16_mma are those of the table."""

    family: KernelFamily
    tile: CtaTile
    tokens: tuple[int, ...]
    changes: Changes = ()

    @property
    def proven(self) -> bool:
        """Whether results are meant to be right."""
        return self.changes not in (PIPELINE, PIPELINE_E4M3, MATH)

    @property
    def tolerance(self) -> float:
        """Most error against the reference."""
        return FAST_TOLERANCE if self.family is W4A8_ROWS_FAST else TOLERANCE


def _wgmma(
    block_m: int,
    shape: tuple[int, int, int],
    widths: tuple[int, ...],
    tokens: tuple[int, ...],
    changes: Changes = (),
    family: KernelFamily = W4A16_WGMMA,
) -> Variant:
    """``shape``: warpgroups, blocks of 64 rows of weights for each, and blocks of 64 columns in a stage."""
    warpgroups, n_blocks, k_blocks = shape
    tile = CtaTile(
        block_m=block_m, block_n=64 * n_blocks * warpgroups, block_k=64 * k_blocks, warpgroups=warpgroups, widths=widths
    )
    return Variant(family, tile, tokens, changes)


_e4m3 = partial(_wgmma, family=W4A8)
_rows = partial(_wgmma, family=W4A8_ROWS)
_all = partial(_wgmma, family=W4A8_ROWS_FAST)


def _mma(block_m: int, tokens: tuple[int, ...], changes: Changes = ()) -> Variant:
    return Variant(W4A16_MMA, W4A16_MMA.tiles[block_m], tokens, changes)


FEW, SOME, MANY = (256, 512, 1024), (1024, 2048), (4096, 8192)
VARIANTS: dict[str, Variant] = {
    # As compiled for users, and what bounds them.
    "32": _wgmma(32, (4, 2, 2), (16,), (64, 128, *FEW)),
    "64": _wgmma(64, (4, 1, 2), (32, 48), SOME),
    "128": _wgmma(128, (2, 2, 2), (48, 96), MANY),
    "256": _wgmma(256, (2, 1, 1), (96, 160, 192, 224), MANY),
    "32-pipeline": _wgmma(32, (4, 2, 2), (16,), FEW[1:], changes=PIPELINE),
    "32-math": _wgmma(32, (4, 2, 2), (16,), FEW[1:], changes=MATH),
    "64-pipeline": _wgmma(64, (4, 1, 2), (32, 48), SOME[1:], changes=PIPELINE),
    "64-math": _wgmma(64, (4, 1, 2), (32, 48), SOME[1:], changes=MATH),
    "128-pipeline": _wgmma(128, (2, 2, 2), (48, 96), MANY[:1], changes=PIPELINE),
    "128-math": _wgmma(128, (2, 2, 2), (48, 96), MANY[:1], changes=MATH),
    "256-pipeline": _wgmma(256, (2, 1, 1), (96, 160, 192, 224), MANY[1:], changes=PIPELINE),
    "256-math": _wgmma(256, (2, 1, 1), (96, 160, 192, 224), MANY[1:], changes=MATH),
    # Two shifts as multiplications, which are made elsewhere than what else decoding takes.
    "32-multiplied": _wgmma(32, (4, 2, 2), (16,), FEW, changes=MULTIPLIED),
    "64-multiplied": _wgmma(64, (4, 1, 2), (32, 48), SOME, changes=MULTIPLIED),
    "mma-8-multiplied": _mma(8, (1, 16, 64, 128), changes=MULTIPLIED),
    # Other shapes.
    "16": _wgmma(16, (4, 2, 2), (), FEW[:2]),
    "16-unrolled": _wgmma(16, (4, 2, 2), (), FEW[:2], changes=UNROLLED),
    "24": _wgmma(24, (4, 2, 2), (16,), FEW[:2]),
    "32-wide": _wgmma(32, (4, 2, 2), (), FEW),
    "32-12warps": _wgmma(32, (3, 2, 2), (8, 16, 24), FEW),
    "32-12warps-unrolled": _wgmma(32, (3, 2, 2), (16, 24), FEW, changes=UNROLLED),
    "32-8warps": _wgmma(32, (2, 4, 2), (16, 24), FEW),
    "48-12warps": _wgmma(48, (3, 2, 2), (16, 24, 32), (512, *SOME)),
    "64-12warps": _wgmma(64, (3, 1, 2), (16, 24, 32, 48), SOME),
    "64-8warps": _wgmma(64, (2, 2, 2), (24, 32, 48), SOME),
    "128-12warps": _wgmma(128, (3, 1, 2), (80, 96, 112), MANY),
    "256-12warps": _wgmma(192, (3, 1, 1), (112, 144), MANY),
    # Few rows.
    "mma-8": _mma(8, (1, 2, 4, 8, 16, 32, 64, 128)),
    # Rows in E4M3: as compiled for users, what bounds them, other shapes, and ping-pong.
    "e4m3-16": _e4m3(16, (4, 1, 4), (8,), (1, 8, 16, 32, 64, 128, 256)),
    "e4m3-32": _e4m3(32, (4, 1, 4), (8, 16, 24), FEW),
    "e4m3-64": _e4m3(64, (4, 1, 4), (32, 48), SOME),
    "e4m3-128": _e4m3(128, (2, 2, 2), (32, 64, 96, 112), MANY),
    "e4m3-16-pipeline": _e4m3(16, (4, 1, 4), (8,), (16, 64), changes=PIPELINE_E4M3),
    "e4m3-16-math": _e4m3(16, (4, 1, 4), (8,), (16, 64), changes=MATH),
    "e4m3-64-math": _e4m3(64, (4, 1, 4), (32, 48), SOME[1:], changes=MATH),
    "e4m3-128-math": _e4m3(128, (2, 2, 2), (32, 64, 96, 112), MANY[:1], changes=MATH),
    "e4m3-24": _e4m3(24, (4, 1, 4), (8, 16), FEW),
    "e4m3-48": _e4m3(48, (4, 1, 4), (16, 24, 32), SOME),
    "e4m3-96": _e4m3(96, (2, 2, 2), (48, 64, 80), MANY),
    "e4m3-112": _e4m3(112, (2, 2, 2), (64, 80, 96), MANY),
    "e4m3-64-ping-pong": _e4m3(64, (4, 1, 4), (32, 48), SOME, changes=PING_PONG),
    "e4m3-128-no-ping-pong": _e4m3(128, (2, 2, 2), (32, 64, 96, 112), MANY, changes=NO_PING_PONG),
    # One scale a row of x.
    "rows-128": _rows(128, (2, 2, 2), (32, 64, 96, 112), MANY),
    "rows-128-512": _rows(128, (2, 2, 2), (32, 64, 96, 112), MANY, changes=_promoted(512)),
    "rows-128-computed": _rows(128, (2, 2, 2), (32, 64, 96, 112), MANY, changes=COMPUTED),
    "rows-112": _rows(112, (2, 2, 2), (64, 80, 96), MANY),
    "rows-128-widths": _rows(128, (2, 2, 2), (32, 64, 80, 88, 96, 104, 112, 120), MANY),
    "rows-64": _rows(64, (4, 1, 2), (32, 48), MANY),
    "rows-112-12warps": _rows(112, (3, 1, 2), (64, 80, 88, 96, 104), MANY),
    "rows-120-12warps": _rows(120, (3, 1, 2), (64, 80, 88, 96, 104, 112), MANY),
    "rows-128-all": _all(128, (2, 2, 2), (32, 64, 96, 112), MANY),
    "rows-128-12warps-all": _all(128, (3, 1, 2), (64, 80, 96, 112), MANY),
    "rows-104-16warps-all": _all(104, (4, 1, 2), (64, 80), MANY),
    "rows-112-16warps-all": _all(112, (4, 1, 2), (80,), MANY),
    "rows-128-math": _rows(128, (2, 2, 2), (32, 64, 96, 112), MANY, changes=MATH),
}


def sources(variant: Variant) -> dict[str, str]:
    """The kernels' files with the variant's changes, and ``instantiations/variant.cu``."""
    files = kernel_build.sources()
    for name, old, new in variant.changes:
        if files[name].count(old) != 1:
            raise SystemExit(f"{name}: expects once, got {files[name].count(old)} times: {old!r}")
        files[name] = files[name].replace(old, new)
    family = replace(variant.family, tiles={variant.tile.block_m: variant.tile}, parts=("gate_up", "down"))
    unit = kernel_build.unit_source(family, "mxfp4")
    files["instantiations/variant.cu"] = unit
    there, end = files["ptx/wgmma.cuh"], "// clang-format on"
    widths = sorted({variant.tile.block_m, *variant.tile.widths}) if variant.tile.warpgroups else []
    missing = "".join(_wgmma_rs(n) for n in widths if f"POLYMOE_WGMMA({n}," not in there)
    files["ptx/wgmma.cuh"] = there.replace(end, missing + end)
    return files


def _wgmma_rs(n: int) -> str:
    """The specialization of wgmma.cuh's ``WgmmaRS`` for n rows of x."""
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    methods = "".join(
        f"""    static __device__ __forceinline__ void {name}(float* d, const uint32_t (&a)[4], uint64_t b) {{
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n{n}{kind} {{{d}}}, {{{a}}}, %{count + 4}, {flags};"
            : {outputs}
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }}
"""
        for name, kind, flags in (
            ("add_bf16", "k16.f32.bf16.bf16", "1, 1, 1, 0"),
            ("set_e4m3", "k32.f32.e4m3.e4m3", "0, 1, 1"),
            ("add_e4m3", "k32.f32.e4m3.e4m3", "1, 1, 1"),
        )
    )
    return f"template <>\nstruct WgmmaRS<{n}> {{\n{methods}}};\n\n"


def build(folder: Path, names: Sequence[str]) -> None:
    """Compile to ``folder/NAME.cubin``; prints what the assembler has to say."""
    nvcc = Path(f".venv/cuda-{kernel_build.COMPILER['nvidia-cuda-nvcc']}/nvidia/cu13/bin/nvcc").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            for file, text in sources(VARIANTS[name]).items():
                path = Path(temporary, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            made = (folder / f"{name}.cubin").resolve()
            command = [nvcc, *SM90.options, "-o", made, "instantiations/variant.cu"]
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if line.strip()]
        print(f"{name}: {'built' if done.returncode == 0 else 'FAILED'}", *said, sep="\n    ", flush=True)


def emulate(_: Path, names: Sequence[str]) -> None:
    """Run on the CPU with a small layer and compare."""
    sys.path.insert(0, "tests")
    from polymoe.backends.reference import run_experts
    from polymoe.problem.numerics import relative_error
    from support.cuda_calls import gpu  # type: ignore
    from support.cuda_emulator import Emulator, compile_files, compile_unit  # type: ignore
    from support.problems import problem_of, random_call, random_experts  # type: ignore

    torch.cuda.get_device_properties = lambda device: gpu(3)  # type: ignore[assignment]
    weights = random_experts(hidden=576, intermediate=448, experts=3)
    libraries = {unit: compile_unit(unit) for unit in ("permute", "finalize", "quantize")}
    for name in names:
        if not VARIANTS[name].proven:
            continue
        variant = VARIANTS[name]
        layout, activations = _layout(variant)
        problem = problem_of(weights, activations=activations)
        packed = LAYOUTS[layout].pack(weights, torch.device("cpu"))
        library = compile_files(sources(variant), "instantiations/variant.cu", ("GemmArgs",), name)
        units = {**libraries, variant.family.unit("mxfp4"): library}
        modules.kernel = Emulator(units, list(packed.tensors.values()))
        x, routing = random_call(170, 576, 3, 2, torch.bfloat16)
        out = torch.full_like(x, float("nan"))
        _call(variant, 64, problem, packed)(x, routing, out)
        print(f"{name}: error {relative_error(out, run_experts(problem, weights, x, routing)):.2g}", flush=True)


def _layout(variant: Variant) -> tuple[str, str]:
    """The layout of weights, and how x is quantized."""
    if variant.family in (W4A8_ROWS, W4A8_ROWS_FAST):
        return "w4a8_fragments", variant.family.activations[0]
    return ("w4a8_fragments", "fp8_group128") if variant.family is W4A8 else ("w4a16_fragments", "16bit")


def _call(
    variant: Variant, block_n: int, problem: Problem, packed: Packed
) -> Callable[[Tensor, Routing, Tensor], None]:
    """Runs the backend in the variant's configuration."""
    tiles, tile = variant.family.tiles, variant.tile
    assert isinstance(tiles, dict)
    tiles[tile.block_m] = tile  # which sizes there are
    config = CudaConfig(variant.family.name, tile.block_m, block_n if variant.family.block_ns else 0)
    runner = Cuda().bind(problem, packed)
    return lambda x, routing, out: runner.run(CallArguments(x, *routing, out), config)


class Launcher:
    """Takes the place of ``modules.kernel``: a variant's GEMMs, and no more than ``most`` launches a call."""

    def __init__(self, cubin: Path, most: int = 9) -> None:
        self.cubin, self.most, self.made = cubin, most, 0

    def __call__(self, unit: str, name: str, target: Target) -> Launcher.Kernel:
        """A kernel, of the variant unless it is one of those around the GEMMs."""
        around = unit in ("permute", "finalize", "quantize")
        kernel = shipped_kernel(unit, name, target) if around else _kernel(self.cubin, name)
        return Launcher.Kernel(self, kernel, name)

    class Kernel:
        """Prepares launches that are not made where there have been enough."""

        def __init__(self, launcher: Launcher, kernel: Any, name: str) -> None:
            self.launcher, self.kernel, self.name = launcher, kernel, name

        def prepare(self, *args: Any) -> Any:
            """As ``driver.Kernel.prepare``."""
            launcher, name, launch = self.launcher, self.name, self.kernel.prepare(*args)

            class Launch:
                set_grid = staticmethod(launch.set_grid)

                def __call__(self, stream: int) -> None:
                    first = name.startswith("permutation")
                    launcher.made = int(name != "permutation_count") if first else launcher.made + 1
                    if launcher.made <= launcher.most:
                        launch(stream)

            return Launch()


@cache
def _module(cubin: Path) -> Module:
    return Module(cubin.read_bytes())


@cache
def _kernel(cubin: Path, name: str) -> Any:
    return _module(cubin).kernel(name)


@cache
def _layer(layout: str, activations: str) -> tuple[Problem, Packed]:
    """DeepSeek-V4-Flash's shape with random codes and scales, packed."""
    encoding = FORMATS["mxfp4"].encoding
    spec = ExpertsSpec(hidden=4096, intermediate=2048, experts=256, gate=encoding, up=encoding, down=encoding)
    g = torch.Generator("cuda").manual_seed(0)
    tensors = {}
    for name, (n, k) in (("up", (4096, 4096)), ("down", (4096, 2048))):
        tensors[f"{name}.codes"] = torch.randint(256, (256, n * k // 2), generator=g, device="cuda", dtype=torch.uint8)
        scales = torch.randint(117, 121, (256, n, k // 32), generator=g, device="cuda", dtype=torch.uint8)
        if layout == "w4a16_fragments":
            packed = [pack_scales(s[..., None], encoding, k) for s in scales]
        else:  # random codes are zeros in no whole group
            packed = [w4a8_fragments.pack_scales(s, torch.zeros_like(s, dtype=torch.bool))[0] for s in scales]
        tensors[f"{name}.scales"] = torch.stack(packed)
    problem = Problem(spec=spec, activation=SwiGLU(limit=10.0), top_k=6, activations=activations)  # type: ignore[arg-type]
    return problem, Packed(layout, spec, tensors)


def _routing(tokens: int, seed: int) -> Routing:
    g = torch.Generator("cuda").manual_seed(1_000_003 * seed + tokens)
    ids = torch.rand(tokens, 256, generator=g, device="cuda").topk(6).indices
    weights = torch.rand(tokens, 6, generator=g, device="cuda") + 0.1
    return Routing(ids, weights / weights.sum(1, keepdim=True))


@cache
def _dequantized(weights: ExpertWeights, e: int) -> tuple[Tensor, ...]:
    """Gate, up and down in float32: 26 GB for all experts."""
    expert = weights.expert(e)
    return tuple(expert.projections[name].dequantize() for name in ("gate", "up", "down"))


def _reference(problem: Problem, weights: ExpertWeights, x: Tensor, routing: Routing) -> Tensor:
    out, x = torch.zeros(x.shape, device="cuda"), emulate_activations(x.float(), problem.activations)
    for e in routing.topk_ids_TA.unique().tolist():
        rows, slots = (routing.topk_ids_TA == e).nonzero(as_tuple=True)
        gate, up, down = _dequantized(weights, e)
        h = problem.activation(x[rows] @ gate.T, x[rows] @ up.T)  # type: ignore[call-arg]
        h = emulate_activations(h, problem.activations)
        out.index_add_(0, rows, (h @ down.T) * routing.topk_weights_TA[rows, slots][:, None])
    return out


def run(folder: Path, names: Sequence[str]) -> None:
    """Compare and time on this GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False

    @cache
    def calls(tokens: int) -> list[tuple[Tensor, Routing]]:
        g = torch.Generator("cuda").manual_seed(tokens)
        count = distinct_calls(tokens)
        x = torch.randn(count, tokens, 4096, generator=g, device="cuda").bfloat16()
        return [(x[i], _routing(tokens, i)) for i in range(count)]

    @cache
    def expected(layout: str, activations: str, tokens: int) -> Tensor:
        problem, packed = _layer(layout, activations)
        return _reference(problem, LAYOUTS[layout].unpack(packed), *calls(tokens)[0])

    for name in names:
        variant, cubin = VARIANTS[name], folder / f"{name}.cubin"
        problem, packed = _layer(*_layout(variant))
        for block_n in variant.family.block_ns or (0,):
            for tokens in variant.tokens:
                title = f"{name}{f'/{block_n}' if block_n else ''}, {tokens} tokens"
                try:
                    modules.kernel = Launcher(cubin)
                    inputs = calls(tokens)
                    outs = [torch.full_like(x, float("nan")) for x, _ in inputs]
                    _call(variant, block_n, problem, packed)(*inputs[0], outs[0])
                    torch.cuda.synchronize()
                    reference = expected(*_layout(variant), tokens) if variant.proven else outs[0].float()
                    error = float((outs[0].float() - reference).norm() / reference.norm())
                    if variant.proven and not error <= variant.tolerance:
                        print(f"{title}: WRONG, error {error:.2g}", flush=True)
                        continue
                    times = []
                    for most in (9, 1, 2, 3):
                        modules.kernel = Launcher(cubin, most)
                        call = _call(variant, block_n, problem, packed)
                        each = [partial(call, *i, o) for i, o in zip(inputs, outs, strict=True)]
                        times.append(TimedCalls(each, torch.device("cuda"), graph=True).time())
                except Exception as error:  # one variant's failure says nothing about the others'
                    print(f"{title}: {type(error).__name__}: {error}", flush=True)
                    continue
                parts = " ".join(f"{t.median_us:.1f}" for t in times[1:])
                t = times[0]
                print(
                    f"{title}: {t.median_us:.1f} us [{t.p25_us:.1f} {t.p75_us:.1f}], launches up to: {parts}, "
                    f"error {error:.2g}",
                    flush=True,
                )


def once(folder: Path, name: str, tokens: int) -> None:
    """Two calls with different routings, the second with everything loaded; w4a16_mma with block_n 64."""
    problem, packed = _layer(*_layout(VARIANTS[name]))
    modules.kernel = Launcher(folder / f"{name}.cubin")
    call = _call(VARIANTS[name], 64, problem, packed)
    x = torch.randn(tokens, problem.spec.hidden, device="cuda").bfloat16()
    for seed in range(2):
        call(x, _routing(tokens, seed), torch.empty_like(x))
    torch.cuda.synchronize()


def main() -> None:
    """See the module."""
    if len(sys.argv) == 5 and sys.argv[1] == "once" and sys.argv[3] in VARIANTS and sys.argv[4].isdecimal():
        once(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    verbs = {"build": build, "emulate": emulate, "run": run}
    unknown = [name for name in sys.argv[3:] if name not in VARIANTS]
    if len(sys.argv) < 3 or sys.argv[1] not in verbs or unknown:
        print(f"{__doc__}\nvariants: {', '.join(VARIANTS)}", file=sys.stderr)
        raise SystemExit(2)
    verbs[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:] or list(VARIANTS))


if __name__ == "__main__":
    main()
