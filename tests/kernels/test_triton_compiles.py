"""Every launch of the Triton backend, compiled ahead of time for every architecture, without a GPU.

The backend runs on meta tensors with its launches recorded instead of made, so that it compiles what would run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polymoe.backends.packages import at_least
from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.bench.cases import CASES
from polymoe.formats import FORMATS, Encoding, PerGroup
from polymoe.machine import Machine
from polymoe.problem.activations import GeGLU
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.verdict import Accepted

triton = pytest.importorskip("triton")

from support.triton_launches import Launch, launches, meta_layer  # noqa: E402 - it needs triton

ARCHITECTURES = (80, 89, 90, 100, 120)
MODES = ("16bit", "fp8_token", "fp8_group128", "fp8_static", "mxfp8")
GEMMS = ("grouped_gemm", "grouped_gemm_short_k", "grouped_gemm_block_scaled")
NARROW, WIDE = 1, 8192
"""Tokens of a call with the narrowest tiles and split K, and of one with the widest."""

QUICK = {
    ("mxfp4", "16bit", 90, NARROW),
    ("mxfp4", "16bit", 90, WIDE),
    ("mxfp4", "16bit", 120, WIDE),
    ("fp8_block128", "fp8_group128", 80, WIDE),
    ("nvfp4", "fp8_group128", 100, WIDE),
    ("mxfp8", "mxfp8", 90, WIDE),
    ("int4_g32", "fp8_group128", 90, WIDE),
}

MOST_SPILLED_BYTES = 32
"""Eight registers: DeepSeek-V3's FP8 on Hopper, whose tile is the fastest all the same. Nearly all others spill 0."""


def compiled(launch: Launch, sm: int) -> Any:
    kernel, signature, constants, attributes = launch.kernel, {}, {}, {}
    assert launch.options["enable_fp_fusion"] is True, launch.name  # Triton's default changes in 3.10
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = launch.values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + triton.runtime.jit.type_canonicalisation_dict[str(value.dtype).split(".")[1]]
        elif parameter.is_constexpr or not isinstance(value, int) or value == 1:
            signature[name] = "constexpr"
            constants[(index,)] = value
            continue
        else:
            signature[name] = "i32"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", sm, 32)
    return triton.compile(source, target=target, options={k: v for k, v in launch.options.items() if v is not None})


def dumped(binary: Any, directory: Path, what: str) -> str:
    path = directory / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, path], check=True, capture_output=True, text=True).stdout


def local_bytes(binary: Any, directory: Path) -> int:
    """Return the bytes of local memory of a thread, which are spilled registers."""
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", dumped(binary, directory, "-res-usage"))))


def require_that_it_fits(launch: Launch, sm: int, directory: Path) -> Any:
    binary = compiled(launch, sm)
    assert binary.metadata.shared <= Machine.of(f"sm_{sm}").device.shared_memory_bytes, launch.name
    assert (getattr(binary.metadata, "tmem_size", None) or 0) <= 512, launch.name  # columns of tensor memory (SM100)
    found = local_bytes(binary, directory)
    assert found <= MOST_SPILLED_BYTES, f"{launch.name} {launch.options} spills {found} bytes"
    return binary


def cells() -> Iterator[Any]:
    """Yield what the backend accepts. Narrow tiles hardly depend on the mode: once for each format, and FP8's own.

    Activations with power-of-two scales are in 16 bits when they are multiplied: they are compiled with MXFP8 weights
    alone, and in groups of 32.
    """
    for format in FORMATS:
        for mode in MODES:
            for sm in ARCHITECTURES:
                problem, _ = meta_layer(format, activations=mode)
                verdict = Triton().check(problem, Machine(Machine.of(f"sm_{sm}").device, {"triton": "3.6.0"}))
                for tokens in (NARROW, WIDE) if isinstance(verdict, Accepted) else ():
                    if mode == "mxfp8" != format:
                        continue
                    if tokens == WIDE or mode == "16bit" or (format, mode) == ("fp8_block128", "fp8_group128"):
                        cell = format, mode, sm, tokens
                        yield pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow])


def test_every_mode_of_every_format_is_declared() -> None:
    declared = {cell.values[:3] for cell in cells()}
    assert declared == {
        (f, mode, sm) for f in FORMATS for mode in MODES for sm in ARCHITECTURES if mode in (f, *MODES[:4])
    }


@pytest.mark.parametrize(("format", "mode", "sm", "tokens"), list(cells()))
def test_every_cell_compiles_and_fits(format: str, mode: str, sm: int, tokens: int, tmp_path: Path) -> None:
    gemms = [x for x in launches(*meta_layer(format, activations=mode), f"sm_{sm}", tokens) if x.name in GEMMS]
    assert len(gemms) == 2
    for launch in gemms:
        require_that_it_fits(launch, sm, tmp_path)


@pytest.mark.skipif(not at_least(triton.__version__, "3.7.1"), reason="this Triton has no block-scaled MMA for SM120")
@pytest.mark.parametrize(
    ("format", "mode"),
    [("mxfp4", "fp8_group128_ue8m0"), *(pytest.param(f, "mxfp8", marks=pytest.mark.slow) for f in ("mxfp4", "mxfp8"))],
)
def test_powers_of_two_on_sm120_by_block_scaled_mmas(format: str, mode: str, tmp_path: Path) -> None:
    """Whole columns, and masked ones. Few rows have 16-bit MMAs."""
    for hidden, intermediate in ((4096, 2048), (2880, 720)):
        layer = meta_layer(format, hidden=hidden, intermediate=intermediate, activations=mode)
        gemms = [x for x in launches(*layer, "sm_120", WIDE) if x.name in GEMMS]
        assert [x.name for x in gemms] == ["grouped_gemm_block_scaled"] * 2
        for launch in gemms:
            binary = require_that_it_fits(launch, 120, tmp_path)
            instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(\S+)", dumped(binary, tmp_path, "-sass"), re.M)
            assert "HMMA" not in {name.split(".")[0] for name in instructions}
            assert sum(name.startswith("QMMA.SF.16832") for name in instructions) >= 32
    assert "grouped_gemm" in {x.name for x in launches(*layer, "sm_120", NARROW)}


@pytest.mark.slow
def test_sm121_compiles_as_sm120_does(tmp_path: Path) -> None:
    """Triton 3.7.1 has no block-scaled MMA for SM121, where 3.8.0 has; these kernels use none."""
    for launch in launches(*meta_layer("mxfp4"), "sm_121", WIDE):
        require_that_it_fits(launch, 121, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "activations"), [*((case, None) for case in CASES), ("kimi-k2", "fp8_token"), ("kimi-k2-tp8", "fp8_token")]
)
def test_plans_of_named_cases_fit_into_99_kib(case: str, activations: str | None) -> None:
    """What Triton allocates for the tiles that are planned on SM120, whose CTAs have 99 KiB of shared memory."""
    problem, machine = CASES[case].problem(None, activations), Machine.of("sm_120")
    spec = problem.spec
    sizes: dict[str, Any] = {"hidden": spec.hidden, "intermediate": spec.intermediate, "gated": spec.gated}
    layer = meta_layer(spec.up, **sizes, bias=spec.bias, activations=problem.activations)
    planned = {Triton().configure(problem, machine, tokens): tokens for tokens in (1, 16, 64, 256, 1024, 4096)}
    for config, tokens in planned.items():
        for launch in launches(*layer, "sm_120", tokens, config=config):
            if launch.name in GEMMS:
                assert compiled(launch, 120).metadata.shared <= 99 * 1024, (launch.name, config)


@pytest.mark.parametrize("sm", [pytest.param(sm, marks=[] if sm == 90 else [pytest.mark.slow]) for sm in ARCHITECTURES])
def test_the_other_kernels_compile(sm: int, tmp_path: Path) -> None:
    """Permute of few and of many rows, inputs in each mode, the sum of split-K parts, and finalize."""
    calls = [("16bit", 1), ("16bit", 8192), ("fp8_token", 64), ("fp8_group128", 1), ("fp8_static", 8192), ("mxfp8", 64)]
    names = set()
    for mode, tokens in calls:
        for launch in launches(*meta_layer("mxfp4", activations=mode), f"sm_{sm}", tokens):
            names.add(launch.name)
            if launch.name not in GEMMS:
                require_that_it_fits(launch, sm, tmp_path)
    names.discard("grouped_gemm_block_scaled")
    assert names == {"_count_rows", "_permute", "grouped_gemm", "_activate_and_quantize", "_finalize"}


INT4_ZERO_POINTS = Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype="bfloat16", zero_points=True)
MEDIUM = TritonConfig(32, Tile(64, 128), Tile(64, 128), tail_block_m=16)
FLOAT16_ZERO_POINTS = replace(INT4_ZERO_POINTS, scale_dtype="float16")
# Name: format, options of the layer, and configuration (None: the heuristic's for many tokens, a number: for so many).
WIDE_SCALES = ScaleRange(largest_exponent=26)

VARIANTS: dict[str, tuple[str | Encoding, dict[str, Any], TritonConfig | int | None]] = {
    "wide scales": ("mxfp4", {"scales": WIDE_SCALES}, None),
    "wide scales, narrow": ("mxfp4", {"scales": WIDE_SCALES}, TritonConfig(8, Tile(64, 64), Tile(32, 64, 2))),
    "wide scales, fp8": ("mxfp4", {"scales": WIDE_SCALES, "activations": "fp8_group128"}, None),
    "zero points": (INT4_ZERO_POINTS, {}, None),
    "zero points, fp8": (FLOAT16_ZERO_POINTS, {"activations": "fp8_token"}, None),
    "zero points, fp8 by group": (FLOAT16_ZERO_POINTS, {"activations": "fp8_group128"}, None),
    "zero points, fp8, medium": (FLOAT16_ZERO_POINTS, {"activations": "fp8_token"}, 32),
    "zero points, fp8, narrow": (FLOAT16_ZERO_POINTS, {"activations": "fp8_group128"}, 1),
    "int4, mxfp8": ("int4_g32", {"activations": "mxfp8"}, None),
    "no gate": ("nvfp4", {"gated": False, "bias": False, "hidden": 1024, "intermediate": 2688}, None),
    "no gate, split": ("bf16", {"gated": False}, TritonConfig(16, Tile(64, 64, split_k=4), Tile(64, 64, split_k=2))),
    "both split": ("mxfp4", {}, TritonConfig(8, Tile(64, 256, split_k=4), Tile(32, 256, 2, split_k=2))),
    "split, fp8": (
        "fp8_block128", {"activations": "fp8_group128"}, replace(MEDIUM, up=Tile(64, 128, split_k=4)),
    ),
    "weight on the input": ("fp8_channel", {"weight_on": "input", "activations": "fp8_token"}, MEDIUM),
    "gelu": ("bf16", {"activation": GeGLU()}, MEDIUM),
    "gelu tanh": ("bf16", {"activation": GeGLU("tanh")}, MEDIUM),
    "no pdl": ("mxfp4", {}, MEDIUM),
    "maxnreg": ("mxfp4", {}, replace(MEDIUM, up=Tile(64, 128, 8, maxnreg=128), pdl=True)),
    **{
        f"several N blocks, {format}, {mode}": (
            format, {"hidden": 7168, "intermediate": 256, "activations": mode}, None,
        )
        for format, mode in (
            ("mxfp4", "16bit"), ("int4_g32", "16bit"), ("nvfp4", "16bit"), ("fp8_block128", "16bit"),
            ("fp8_block128", "fp8_group128"), ("mxfp4", "fp8_group128"), ("fp8_channel", "fp8_token"),
        )
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_compiles_and_fits(name: str, sm: int, tmp_path: Path) -> None:
    format, options, config = VARIANTS[name]
    tokens, config = (config, None) if isinstance(config, int) else (4096, config)
    if config is not None and config.pdl and sm < 90:
        config = replace(config, pdl=False)
    gemms = [
        launch
        for launch in launches(*meta_layer(format, **options), f"sm_{sm}", tokens, config=config)
        if launch.name in GEMMS
    ]
    short_k = "N blocks" in name and not (sm == 100 and gemms[0].values["PLANES"] == 4)  # too little tensor memory
    assert [x.name for x in gemms] == ["grouped_gemm", "grouped_gemm_short_k" if short_k else "grouped_gemm"]
    for launch in gemms:
        require_that_it_fits(launch, sm, tmp_path)
