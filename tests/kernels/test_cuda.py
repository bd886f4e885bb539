"""The compiled CUDA kernels: made from these sources, with every kernel that the backend may ask for."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.kernels.cuda import compiled, driver
from polymoe.kernels.cuda.launch import args
from polymoe.kernels.cuda.launch.names import gemm_kernel, helper_kernel
from polymoe.kernels.cuda.sizes import SHARED_BYTES, W4_FORMATS, W4A16_MMA, W4A16_WGMMA
from polymoe.machine import Machine
from support.cuda_calls import launches, names
from support.cuda_emulator import STRUCTS
from support.problems import problem_of, random_experts

SOURCES = Path(compiled.__file__).parent


@pytest.mark.parametrize("unit", compiled.UNITS)
def test_compiled_from_these_sources(unit: str) -> None:
    path = compiled.cubin_path(unit)
    assert path.name == f"{unit}.{compiled.source_hash()}.cubin", "run scripts/build-kernels and commit what it made"
    assert path.read_bytes()[:4] == b"\x7fELF"


def test_the_hash_changes_with_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = compiled.source_hash()
    for path in Path(compiled.__file__).parent.glob("*.cu*"):
        (tmp_path / path.name).write_bytes(path.read_bytes()) if path.is_file() else None
    monkeypatch.setattr(compiled, "_HERE", tmp_path)
    assert compiled.source_hash() == before
    with (tmp_path / "ptx.cuh").open("a") as file:
        file.write("\n")
    assert compiled.source_hash() != before


def test_missing_files_say_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "_HERE", tmp_path)
    with pytest.raises(compiled.DriverError, match=r"rows\.\*\.cubin.*got 0.*scripts/build-kernels"):
        compiled.cubin_path("rows")


def test_a_thread_that_has_not_used_the_gpu_takes_the_device_s_context(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> int:
                calls.append(name)
                return 201 if name == "cuLaunchKernelEx" and "cuCtxSetCurrent" not in calls else 0

            return call

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver.Kernel(Library(), ctypes.c_void_p(), "k").prepare(args.PermuteArgs(), 32)(0)
    assert calls == ["cuLaunchKernelEx", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernelEx"]


FORMATS = list(W4_FORMATS)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gated", [True, False])
def test_every_configuration_has_its_kernels(format: str, gated: bool) -> None:
    problem = problem_of(random_experts(format, hidden=256, intermediate=128, gated=gated))
    configs = Cuda().tuning_configs(problem, Machine.of("h200"), 1)
    assert len(configs) == 2 * len(W4A16_MMA.tiles) + len(W4A16_WGMMA.tiles) + 1
    for config in configs:
        assert isinstance(config, CudaConfig)
        for part, block_m in (
            ("gate_up" if gated else "up", config.block_m),
            ("down", config.down_block_m or config.block_m),
        ):
            unit, name = gemm_kernel(config.kernels.sizes, format, part, block_m, config.block_n)
            assert name in names(unit)


@pytest.mark.parametrize("name", [
    "permutation_one_warp", "permutation_one_cta", "permutation_count", "permutation_many_ctas", "permute_x",
    "finalize_f32", "finalize_bf16", "quantize_permuted", "quantize_rows", "quantize_rows_paired",
])  # fmt: skip
def test_kernels_around_the_gemms(name: str) -> None:
    unit, name = helper_kernel(name)
    assert name in names(unit)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_x_that_fit_beside_the_stages(format: str) -> None:
    """Where whole rows of x are in shared memory: 8 of 7168 columns leave room for three stages, 16 do not."""
    assert W4A16_MMA.fits(format, 8, 7168)
    assert not W4A16_MMA.fits(format, 16, 7168)
    assert W4A16_MMA.fits(format, 16, 4096)


def fields(struct: str) -> list[type]:
    """Types of a C++ structure's members, in order."""
    text = "".join(p.read_text() for p in SOURCES.glob("*.cu*") if p.is_file())
    body = re.sub(r"//.*", "", re.findall(rf"struct {struct} {{(.*?)}};", text, re.S)[0])
    found = []
    for line in filter(None, map(str.strip, body.split(";"))):
        names = re.sub(r"^const ", "", line)
        kind = {"long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float}
        c_type = next((t for word, t in kind.items() if re.match(rf"{word} [^*]*$", names)), ctypes.c_void_p)
        names = re.sub(r"^(long long|\w+)\s*\*?", "", names)
        found += [c_type] * len(names.split(","))
    return found


@pytest.mark.parametrize("struct", [
    args.GemmArgs, args.PermutationArgs, args.PermuteArgs, args.QuantizePermutedArgs, args.QuantizeRowsArgs,
    args.FinalizeArgs,
])  # fmt: skip
def test_arguments_are_the_structures_of_the_sources(struct: Any) -> None:
    assert [kind for _, kind in struct._fields_] == fields(STRUCTS.get(struct.__name__, struct.__name__))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("config", [CudaConfig("w4a16_mma", 16, 128), CudaConfig("w4a16_wgmma", 64)], ids=str)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, config: CudaConfig, gated: bool) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory."""
    made, tensors = launches(monkeypatch, "mxfp4", config, gated)
    tiled = config.family == "w4a16_wgmma"
    gemms = [
        gemm_kernel(config.kernels.sizes, "mxfp4", part, config.block_m, config.block_n)[1]
        for part in ("gate_up" if gated else "up", "down")
    ]
    first, x, finalize = (
        helper_kernel(name)[1]
        for name in ("permutation_one_warp", "permute_x", "finalize_bf16" if tiled else "finalize_f32")
    )
    assert [name for name, *_ in made] == [first, *([x] if tiled else []), *gemms, finalize]
    by_name = {name: rest for name, *rest in made}
    up, down = (by_name[name] for name in gemms)
    assert (up[0]["n"], up[0]["k"]) == ((544 if gated else 272), 336)
    assert (down[0]["n"], down[0]["k"], down[0]["top_k"]) == (336, 272, 0)
    assert up[0]["top_k"] == (0 if tiled else 3)  # x is by token
    assert up[0]["codes_stride"] * 5 == tensors["up.codes"].numel()
    assert up[0]["bias_dtype"] == 1  # bfloat16
    assert up[0]["bias"] == tensors["gate_bias" if gated else "up_bias"].data_ptr()
    for _, grid, threads, shared in (up, down):
        assert grid == (132, 1)
        assert threads % 32 == 0
        assert threads <= 1024
        assert 16 * 1024 < shared <= SHARED_BYTES
    assert by_name[first][0]["rows"] == 30
    assert by_name[finalize][1] == (10, 1)  # tokens come first: more than 65535 CTAs fit only there
    assert by_name[finalize][0]["out_dtype"] == 1  # float16
    assert (by_name[finalize][0]["expanded_to_permuted"] is not None) == tiled  # y is by permuted row


def instructions() -> Any:
    """benchmarks/hopper_instructions.py, where there is a disassembler."""
    pytest.importorskip("triton")
    module = importlib.import_module("hopper_instructions")
    if not module.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    return module


# Instructions for eight weights of each lane, in kernels for 8 rows, and in those for 16 with up to 8 and with more: a
# budget, not a wish.
MOST = {
    "mxfp4": (19.0, 19.0, 20.5), "nvfp4": (22.0, 22.0, 23.0), "int4_g32": (20.0, 23.5, 25.0),
    "int4_g128": (17.5, 23.5, 25.0),
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("matrix", ["gated", "plain", "down"])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("height", [64, 128])
def test_instructions_that_eight_weights_cost(format: str, matrix: str, rows: int, height: int) -> None:
    """Decoding time is instructions: at 4.3 TB/s there are 30 issue slots for eight weights of each lane."""
    found = instructions().disassembled(f"decode_{format}", f"decode_{matrix}_{rows}_{height}")
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found), "spills"
    cost = instructions().decode_costs(format, matrix, rows, height)
    assert sorted(cost) == [8, 16][: rows // 8]
    for some, most in zip(sorted(cost), MOST[format][rows // 16 :], strict=False):
        assert cost[some] <= most


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("matrix", ["gated", "plain", "down"])
@pytest.mark.parametrize(("rows", "widths"), [(32, 2), (64, 3), (128, 3), (256, 5)])
def test_products_run_while_weights_are_decoded(format: str, matrix: str, rows: int, widths: int) -> None:
    """Where the assembler cannot see that registers are safe, each product waits for itself: every one then ends a
    group (gsb0), and none stays under way. Where products are short, what a warp shares is in uniform registers, not
    brought there each time."""
    groups = W4A16_WGMMA.tiles[rows].n_blocks
    inner = instructions().prefill_loops(format, matrix, rows)
    assert len(inner) >= widths
    for body in inner:
        products = [t for t in body if t.startswith("HGMMA")]
        ends = [t for t in products if "gsb0" in t]
        assert len(products) == 2 * groups * len(ends)
        waits = [t for t in body if re.search(r"DEPBAR.*gsb0, 0x1", t)]
        assert len(waits) == len(ends)  # one behind each successor
        assert not any(re.match(r"(LDL|STL)" if rows > 128 else r"(LDL|STL|R2UR)", t) for t in body)
    assert max(instructions().prefill_costs(format, matrix, rows).values()) <= (32 if rows > 128 else 29)


def test_recorded_instructions_are_those_of_the_kernels() -> None:
    """If they are not: python benchmarks/hopper_instructions.py benchmarks/results/hopper-instructions.md."""
    recorded = Path(__file__).parents[2] / "benchmarks/results/hopper-instructions.md"
    assert recorded.read_text(encoding="utf-8") == instructions().table()
