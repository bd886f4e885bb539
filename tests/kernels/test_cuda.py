"""The compiled Hopper kernels: made from these sources, with every kernel that the backend may ask for."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.kernels.cuda import compiled, driver, launch
from polymoe.machine import Machine
from support.cuda_calls import launches, names
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    driver.Kernel(Library(), ctypes.c_void_p(), "k")(launch._Spread(), (1,), 32)
    assert calls == ["cuLaunchKernelEx", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernelEx"]


FORMATS = list(launch.FORMATS)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gated", [True, False])
def test_every_configuration_has_its_kernels(format: str, gated: bool) -> None:
    problem = problem_of(random_experts(format, hidden=256, intermediate=128, gated=gated))
    kind = "gated" if gated else "plain"
    configs = Cuda().tuning_configs(problem, Machine.of("h200"), 1)
    assert len(configs) == len(launch.DECODE) + len(launch.PREFILL) + 1
    for config in configs:
        for part, most in ((kind, config.rows), ("down", config.down_rows or config.rows)):
            rows = -(-most // 8) * 8
            wanted = f"{rows}_{config.height}" if config.kernels == "decode" else f"{rows}"
            assert f"{config.kernels}_{part}_{wanted}" in names(f"{config.kernels}_{format}")
    rows = {"dispatch", "dispatch_few", "count_many", "dispatch_many", "spread", "combine", "combine_narrow"}
    assert rows <= names("rows")
    assert {c.rows for c in configs if c.kernels == "prefill"} == set(launch.PREFILL)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [8, 12, 16])
@pytest.mark.parametrize("columns", [192, 2048, 2880, 4096, 7168])
def test_rings_fit_into_shared_memory(format: str, rows: int, columns: int) -> None:
    stages, buffers, shared = launch._decode_ring(format, rows, columns)
    assert launch.decode_fits(format, rows, columns) == (stages >= 3)
    if launch.decode_fits(format, rows, columns):
        assert shared <= launch.SHARED_BYTES
        assert 1 <= buffers <= 2
        assert stages <= 16
    assert launch.decode_fits(format, 8, 7168)
    assert not launch.decode_fits(format, 16, 7168)


def fields(struct: str) -> list[tuple[str, type]]:
    """Names and types of a C++ structure's members, in order."""
    text = "".join(p.read_text() for p in SOURCES.glob("*.cu*") if p.is_file())
    body = re.sub(r"//.*", "", re.findall(rf"struct {struct} {{(.*?)}};", text, re.S)[0])
    found = []
    for line in filter(None, map(str.strip, body.split(";"))):
        names = re.sub(r"^const ", "", line)
        kind = {"long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float}
        c_type = next((t for word, t in kind.items() if re.match(rf"{word} [^*]*$", names)), ctypes.c_void_p)
        names = re.sub(r"^(long long|\w+)\s*\*?", "", names)
        found += [(name.strip(), c_type) for name in names.split(",")]
    return found


@pytest.mark.parametrize("struct", ["Gemm", "Dispatch", "Spread", "Quantize", "Combine"])
def test_arguments_are_the_structures_of_the_sources(struct: str) -> None:
    assert list(getattr(launch, f"_{struct}")._fields_) == fields(f"{struct}Args")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("config", [CudaConfig("decode", 16, 128), CudaConfig("prefill", 64, 0)], ids=str)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, config: CudaConfig, gated: bool) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    made, tensors = launches(monkeypatch, "mxfp4", config, gated)
    kind = "gated" if gated else "plain"
    size = f"{config.rows}_{config.height}" if config.height else f"{config.rows}"
    products = [f"{config.kernels}_{part}_{size}" for part in (kind, "down")]
    between = ["spread"] if config.kernels == "prefill" else []
    combine = "combine_narrow" if config.kernels == "prefill" else "combine"  # of y in bfloat16, or in float32
    assert [name for name, *_ in made] == ["dispatch_few", *between, *products, combine]
    by_name = {name: rest for name, *rest in made}
    up, down = (by_name[name] for name in products)
    assert (up[0]["rows"], up[0]["columns"]) == ((544 if gated else 272), 336)
    assert (down[0]["rows"], down[0]["columns"], down[0]["slots"]) == (336, 272, 0)
    assert up[0]["codes_expert"] * 5 == tensors["up.codes"].numel()
    assert up[0]["bias_dtype"] == 1  # bfloat16
    assert up[0]["bias"] == tensors["gate_bias" if gated else "up_bias"].data_ptr()
    for _, grid, threads, shared in (up, down):
        assert grid == (132,)
        assert threads % 32 == 0
        assert threads <= 1024
        assert 16 * 1024 < shared <= launch.SHARED_BYTES
    assert by_name["dispatch_few"][0]["rows"] == 30
    assert by_name[combine][1] == (10, 1)  # tokens come first: more than 65535 blocks fit only there
    assert by_name[combine][0]["out_dtype"] == 1  # float16
    assert (by_name[combine][0]["places"] is not None) == (config.kernels == "prefill")  # y is in expert order


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
    groups = launch.PREFILL[rows].groups
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
