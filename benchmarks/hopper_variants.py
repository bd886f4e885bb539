"""Variants of the Hopper kernels, built without a GPU and timed on one: what a change of shape or schedule would give.

    python benchmarks/hopper_variants.py build FOLDER [NAME ...]    compile (scripts/build-kernels fetches the compiler)
    python benchmarks/hopper_variants.py emulate FOLDER [NAME ...]  prove on this CPU, small
    python benchmarks/hopper_variants.py run FOLDER [NAME ...]      prove and time on an H200; DeepSeek-V4-Flash, MXFP4
    python benchmarks/hopper_variants.py once FOLDER NAME TOKENS    two calls and nothing else, for a profiler

A variant is the kernels' own sources with a few words exchanged and other template arguments. ``run`` compares each
with the reference before it is timed, and prints microseconds: of the whole layer, and of what its launches take up to
the dispatch, the first and the second product. Names with ``ring`` (data are brought, nothing is multiplied) and
``math`` (the other way round) bound the others from below and are right about nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymoe.activations import SwiGLU
from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.reference import emulate_activations
from polymoe.bench.timing import TimedCalls, distinct_calls
from polymoe.formats import FORMATS
from polymoe.kernels.cuda import compiled, launch
from polymoe.kernels.cuda.driver import Module
from polymoe.kernels.cuda.launch import E4m3Shape, Shape
from polymoe.layouts import LAYOUTS, Packed, w4a8_fragments
from polymoe.layouts.cuda.w4a16_fragments import pack_scales
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.tensors import ExpertsSpec, ExpertWeights

SOURCES = Path(compiled.__file__).parent
TOLERANCE = 5e-3

Changes = tuple[tuple[str, str, str], ...]
"""File, what stands there once, what shall stand there."""

UNROLLED: Changes = (("prefill.cuh", "MT == 1 ? BLOCKS : 1;", "BLOCKS;"),)
"""Stages of several groups of rows written out."""

RING: Changes = (
    (
        "prefill.cuh",
        "            Multiply<F, WG, MT, MOST, BLOCKS>(acc, args, ring, item.z).template run_all<WIDTHS...>(item.z);\n",
        """            for (int m = 0; m < MT; ++m) {
                for (int i = 0; i < MOST / 2; ++i) acc[m][i] = 0.0f;
            }
            for (int at = 0; at < args.columns; at += 64 * BLOCKS) {
                ring.wait();
                __syncwarp();
                if (lane == 0) barrier_arrive(ring.empty + 8 * ring.slot);
                ring.next();
            }
""",
    ),
)
RING_E4M3: Changes = (
    (
        "w4a8.cuh",
        """        MultiplyE4m3<WG, MT, MOST, BLOCKS>(acc, args, ring, turns, item.z, shared_address(behind))
            .template run_all<WIDTHS...>(item.z);
""",
        RING[0][2],
    ),
)
_COPY = "__device__ __forceinline__ void copy_bulk"
MATH: Changes = (
    ("packed.cuh", "barrier_arrive_expect(barrier, bytes);", "barrier_arrive(barrier);"),
    (
        "ptx.cuh",
        f"{_COPY}(uint32_t shared,",
        f"{_COPY}(uint32_t, const void*, uint32_t, uint32_t) {{}}\n\n{_COPY}_really(uint32_t shared,",
    ),
)
TURNS: Changes = (("w4a8.cuh", "kTurns = MOST > 64;", "kTurns = true;"),)
NO_TURNS: Changes = (("w4a8.cuh", "kTurns = MOST > 64;", "kTurns = false;"),)
"""Whether warpgroups take turns at the matrix units."""
MULTIPLIED: Changes = (
    (
        "formats.cuh",
        """    a[1] = (word << 4) & mask;
""",
        """    a[1] = (word * powers[0]) & mask;
""",
    ),
    ("formats.cuh", "((word << 6) & 0x80C080C0u)", "((word * powers[2]) & 0x80C080C0u)"),
    ("formats.cuh", "// Eight e2m1 codes", "__constant__ uint32_t powers[3] = {16, 1024, 64};\n\n// Eight e2m1 codes"),
)
"""Two of the shifts as multiplications."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Rows of an item; but for decode its shape and narrower widths; the changes; tokens to be timed at. Rows of x are
    in bfloat16, or in E4M3 where the shape is of kernels for those."""

    rows: int
    tokens: tuple[int, ...]
    shape: Shape | None = None
    widths: tuple[int, ...] = ()
    changes: Changes = ()

    @property
    def proven(self) -> bool:
        """Whether results are meant to be right."""
        return self.changes not in (RING, RING_E4M3, MATH)

    @property
    def kernels(self) -> str:
        """Of :class:`HopperConfig`."""
        return "decode" if self.shape is None else "w4a8" if isinstance(self.shape, E4m3Shape) else "prefill"


def _prefill(
    rows: int, shape: tuple[int, int, int], widths: tuple[int, ...], tokens: tuple[int, ...], **kwargs: Any
) -> Variant:
    return Variant(rows, tokens, Shape(*shape), widths, **kwargs)


def _e4m3(
    rows: int, shape: tuple[int, int, int], widths: tuple[int, ...], tokens: tuple[int, ...], **kwargs: Any
) -> Variant:
    return Variant(rows, tokens, E4m3Shape(*shape), widths, **kwargs)


FEW, SOME, MANY = (256, 512, 1024), (1024, 2048), (4096, 8192)
VARIANTS: dict[str, Variant] = {
    # As compiled for users, and what bounds them.
    "32": _prefill(32, (4, 2, 2), (16,), (64, 128, *FEW)),
    "64": _prefill(64, (4, 1, 2), (32, 48), SOME),
    "128": _prefill(128, (2, 2, 2), (48, 96), MANY),
    "256": _prefill(256, (2, 1, 1), (96, 160, 192, 224), MANY),
    "32-ring": _prefill(32, (4, 2, 2), (16,), FEW[1:], changes=RING),
    "32-math": _prefill(32, (4, 2, 2), (16,), FEW[1:], changes=MATH),
    "64-ring": _prefill(64, (4, 1, 2), (32, 48), SOME[1:], changes=RING),
    "64-math": _prefill(64, (4, 1, 2), (32, 48), SOME[1:], changes=MATH),
    "128-ring": _prefill(128, (2, 2, 2), (48, 96), MANY[:1], changes=RING),
    "128-math": _prefill(128, (2, 2, 2), (48, 96), MANY[:1], changes=MATH),
    "256-ring": _prefill(256, (2, 1, 1), (96, 160, 192, 224), MANY[1:], changes=RING),
    "256-math": _prefill(256, (2, 1, 1), (96, 160, 192, 224), MANY[1:], changes=MATH),
    # Two shifts as multiplications, which are made elsewhere than what else decoding takes.
    "32-multiplied": _prefill(32, (4, 2, 2), (16,), FEW, changes=MULTIPLIED),
    "64-multiplied": _prefill(64, (4, 1, 2), (32, 48), SOME, changes=MULTIPLIED),
    "decode-8-multiplied": Variant(8, (1, 16, 64, 128), changes=MULTIPLIED),
    "decode-12-multiplied": Variant(12, (128, 256), changes=MULTIPLIED),
    # Other shapes.
    "16": _prefill(16, (4, 2, 2), (), FEW[:2]),
    "16-unrolled": _prefill(16, (4, 2, 2), (), FEW[:2], changes=UNROLLED),
    "24": _prefill(24, (4, 2, 2), (16,), FEW[:2]),
    "32-wide": _prefill(32, (4, 2, 2), (), FEW),
    "32-12warps": _prefill(32, (3, 2, 2), (8, 16, 24), FEW),
    "32-12warps-unrolled": _prefill(32, (3, 2, 2), (16, 24), FEW, changes=UNROLLED),
    "32-8warps": _prefill(32, (2, 4, 2), (16, 24), FEW),
    "48-12warps": _prefill(48, (3, 2, 2), (16, 24, 32), (512, *SOME)),
    "64-12warps": _prefill(64, (3, 1, 2), (16, 24, 32, 48), SOME),
    "64-8warps": _prefill(64, (2, 2, 2), (24, 32, 48), SOME),
    "128-12warps": _prefill(128, (3, 1, 2), (80, 96, 112), MANY),
    "256-12warps": _prefill(192, (3, 1, 1), (112, 144), MANY),
    # Decode.
    "decode-8": Variant(8, (1, 2, 4, 8, 16, 32, 64, 128)),
    "decode-12": Variant(12, (128, 256)),
    "decode-16": Variant(16, (256,)),
    # Rows in E4M3: as compiled for users, what bounds them, other shapes, and turns.
    "e4m3-16": _e4m3(16, (4, 1, 4), (8,), (1, 8, 16, 32, 64, 128, 256)),
    "e4m3-32": _e4m3(32, (4, 1, 4), (8, 16, 24), FEW),
    "e4m3-64": _e4m3(64, (4, 1, 4), (32, 48), SOME),
    "e4m3-128": _e4m3(128, (2, 2, 2), (32, 64, 96, 112), MANY),
    "e4m3-16-ring": _e4m3(16, (4, 1, 4), (8,), (16, 64), changes=RING_E4M3),
    "e4m3-16-math": _e4m3(16, (4, 1, 4), (8,), (16, 64), changes=MATH),
    "e4m3-64-math": _e4m3(64, (4, 1, 4), (32, 48), SOME[1:], changes=MATH),
    "e4m3-128-math": _e4m3(128, (2, 2, 2), (32, 64, 96, 112), MANY[:1], changes=MATH),
    "e4m3-24": _e4m3(24, (4, 1, 4), (8, 16), FEW),
    "e4m3-48": _e4m3(48, (4, 1, 4), (16, 24, 32), SOME),
    "e4m3-96": _e4m3(96, (2, 2, 2), (48, 64, 80), MANY),
    "e4m3-112": _e4m3(112, (2, 2, 2), (64, 80, 96), MANY),
    "e4m3-64-turns": _e4m3(64, (4, 1, 4), (32, 48), SOME, changes=TURNS),
    "e4m3-128-no-turns": _e4m3(128, (2, 2, 2), (32, 64, 96, 112), MANY, changes=NO_TURNS),
}


def sources(variant: Variant) -> dict[str, str]:
    """The kernels' files with the variant's changes, and ``variant.cu``."""
    files = {path.name: path.read_text() for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"))}
    for name, old, new in variant.changes:
        if files[name].count(old) != 1:
            raise SystemExit(f"{name}: expected once, got {files[name].count(old)} times: {old!r}")
        files[name] = files[name].replace(old, new)
    if variant.shape is None:
        eights = -(-variant.rows // 8)
        lines = [
            f"POLYMOE_DECODE(decode_{kind}_{eights * 8}_{height}, Mxfp4, {eights}, {512 // height}, {matrix})\n"
            for kind, matrix in (("gated", "kGated"), ("down", "kDown"))
            for height in (64, 128)
        ]
        files["variant.cu"] = '#include "decode.cuh"\n' + "".join(lines)
    else:
        s, name = variant.shape, variant.kernels
        numbers = ", ".join(map(str, (s.warpgroups, s.groups, s.blocks, variant.rows, *variant.widths)))
        head = f"POLYMOE_{name.upper()}({name}_"
        format = "Mxfp4, " if name == "prefill" else ""
        lines = [
            f"{head}{kind}_{variant.rows}, {format}{matrix}, {numbers})\n"
            for kind, matrix in (("gated", "kGated"), ("down", "kDown"))
        ]
        files["variant.cu"] = f'#include "{name}.cuh"\n' + "".join(lines)
        widths = {variant.rows, *variant.widths}
        there = files["wgmma.cuh"]
        missing = "".join(_product(n) for n in sorted(widths) if f"POLYMOE_PRODUCT({n}," not in there)
        files["wgmma.cuh"] = there.replace("}  // namespace polymoe", missing + "}  // namespace polymoe")
    return files


def _product(n: int) -> str:
    """The specialization of wgmma.cuh's ``Product`` for n rows of x."""
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
            ("add", "k16.f32.bf16.bf16", "1, 1, 1, 0"),
            ("set_e4m3", "k32.f32.e4m3.e4m3", "0, 1, 1"),
            ("add_e4m3", "k32.f32.e4m3.e4m3", "1, 1, 1"),
        )
    )
    return f"template <>\nstruct Product<{n}> {{\n{methods}}};\n\n"


def build(folder: Path, names: Sequence[str]) -> None:
    """Compile to ``folder/NAME.cubin``; prints what the assembler has to say."""
    nvcc = Path(f".venv/cuda-{compiled.COMPILER['nvidia-cuda-nvcc']}/nvidia/cu13/bin/nvcc").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*names, "rows", "rows_fp8"):
        with tempfile.TemporaryDirectory() as temporary:
            for file, text in sources(VARIANTS[name] if name in VARIANTS else Variant(8, ())).items():
                Path(temporary, file).write_text(text)
            unit = "variant.cu" if name in VARIANTS else f"{name}.cu"
            command = [nvcc, *compiled.OPTIONS, "-o", (folder / f"{name}.cubin").resolve(), unit]
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if line.strip()]
        print(f"{name}: {'built' if done.returncode == 0 else 'FAILED'}", *said, sep="\n    ", flush=True)


def emulate(folder: Path, names: Sequence[str]) -> None:
    """Run on the CPU with a small layer and compare."""
    sys.path.insert(0, "tests")
    from types import SimpleNamespace

    from polymoe.backends.reference import run_experts
    from polymoe.numerics import relative_error
    from support.cuda_emulator import Emulator, compile_files, compile_unit
    from support.problems import problem_of, random_call, random_experts

    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3)  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_experts(hidden=576, intermediate=448, experts=3)
    libraries = {unit: compile_unit(unit, folder) for unit in ("rows", "rows_fp8")}
    for name in names:
        if not VARIANTS[name].proven:
            continue
        variant = VARIANTS[name]
        layout, activations = _held(variant)
        problem, packed = (
            problem_of(weights, activations=activations),
            LAYOUTS[layout].pack(weights, torch.device("cpu")),
        )
        library = compile_files(sources(variant), "variant.cu", ("GemmArgs",), folder, name)
        launch.kernel = Emulator({**libraries, f"{variant.kernels}_mxfp4": library}, list(packed.tensors.values()))
        x, routing = random_call(170, 576, 3, 2, torch.bfloat16)
        out = torch.full_like(x, float("nan"))
        _call(variant, 64)(problem, packed, x, routing, out)
        print(f"{name}: error {relative_error(out, run_experts(problem, weights, x, routing)):.2g}", flush=True)


def _held(variant: Variant) -> tuple[str, str]:
    """The layout of weights, and how x is held."""
    return ("w4a8_fragments", "fp8_group128") if variant.kernels == "w4a8" else ("w4a16_fragments", "16bit")


def _call(variant: Variant, height: int) -> Callable[..., None]:
    """Runs the backend in the variant's configuration."""
    kernels = variant.kernels
    if variant.shape is not None:  # which sizes there are
        launch.IN_TILES[kernels][variant.rows] = variant.shape  # type: ignore[index]
    config = CudaConfig(kernels, variant.rows, height if kernels == "decode" else 0)  # type: ignore[arg-type]

    def call(problem: Problem, packed: Packed, x: Tensor, routing: Routing, out: Tensor) -> None:
        if variant.shape is not None:
            launch.IN_TILES[kernels][variant.rows] = variant.shape  # type: ignore[index]
        Cuda().bind(problem, packed).run(x, routing, config, out)

    return call


class Launcher:
    """Takes the place of ``launch.kernel``: a variant's products, and no more than ``most`` launches a call."""

    def __init__(self, cubin: Path, most: int = 9) -> None:
        self.cubin, self.most, self.made = cubin, most, 0

    def __call__(self, unit: str, name: str) -> Callable[..., None]:
        """The kernel, or nothing where there were enough."""
        if name == "count_many":
            self.made = 0
        elif name.startswith("dispatch"):
            self.made = 1
        else:
            self.made += 1
        if self.made > self.most:
            return lambda *args, **kwargs: None
        return _kernel(_module(self.cubin.with_name(f"{unit}.cubin") if unit.startswith("rows") else self.cubin), name)


@cache
def _module(cubin: Path) -> Module:
    return Module(cubin.read_bytes())


@cache
def _kernel(module: Module, name: str) -> Any:
    return module.kernel(name)


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
            codes = tensors[f"{name}.codes"].view(256, n, k // 2)
            packed = [w4a8_fragments.pack_scales(s, c)[0] for s, c in zip(scales, codes, strict=True)]
        tensors[f"{name}.scales"] = torch.stack(packed)
    problem = Problem(spec=spec, activation=SwiGLU(limit=10.0), top_k=6, activations=activations)
    return problem, Packed(layout, spec, tensors)


def _routing(tokens: int, turn: int) -> Routing:
    g = torch.Generator("cuda").manual_seed(1_000_003 * turn + tokens)
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
        problem, packed = _layer(*_held(variant))
        for height in (64, 128) if variant.shape is None else (0,):
            call = _call(variant, height)
            for tokens in variant.tokens:
                title = f"{name}{f'/{height}' if height else ''}, {tokens} tokens"
                try:
                    launch.kernel = Launcher(cubin)
                    inputs = calls(tokens)
                    outs = [torch.full_like(x, float("nan")) for x, _ in inputs]
                    call(problem, packed, *inputs[0], outs[0])
                    torch.cuda.synchronize()
                    wanted = expected(*_held(variant), tokens) if variant.proven else outs[0].float()
                    error = float((outs[0].float() - wanted).norm() / wanted.norm())
                    if variant.proven and not error <= TOLERANCE:
                        print(f"{title}: WRONG, error {error:.2g}", flush=True)
                        continue
                    times = []
                    for most in (9, 1, 2, 3):
                        launch.kernel = Launcher(cubin, most)
                        each = [partial(call, problem, packed, *i, o) for i, o in zip(inputs, outs, strict=True)]
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
    """Two calls with different routings, the second with everything loaded; decode with tiles 64 high."""
    problem, packed = _layer(*_held(VARIANTS[name]))
    launch.kernel = Launcher(folder / f"{name}.cubin")
    call = _call(VARIANTS[name], 64)
    x = torch.randn(tokens, problem.spec.hidden, device="cuda").bfloat16()
    for turn in range(2):
        call(problem, packed, x, _routing(tokens, turn), torch.empty_like(x))
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
