"""The compiled CUDA kernels: made from these sources, with every kernel that the backend may ask for."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.kernels.cuda import build, driver, modules
from polymoe.kernels.cuda.launch import args, shape
from polymoe.kernels.cuda.spec import (
    KERNEL_FAMILIES,
    W4_FORMATS,
    W4A16_MMA,
    W4A16_MMA_ORDERED,
    W4A16_WGMMA,
    KernelFamily,
)
from polymoe.kernels.cuda.targets import SM90, TARGETS, Target
from polymoe.machine import Machine
from support.cuda_calls import launches, names
from support.cuda_instructions_budget import DISASSEMBLED, MMA_COSTS, instructions
from support.problems import problem_of, random_experts

SOURCES = Path(modules.__file__).parent


@pytest.mark.parametrize("rows", [1, 33, 257, 4096])
@pytest.mark.parametrize("experts", [1, 5, 128])
@pytest.mark.parametrize("block_m", [8, 64, 128])
def test_work_tiles_of_any_routing_have_room(rows: int, experts: int, block_m: int) -> None:
    """Most tiles has a routing in which each expert has one row more than whole tiles."""
    words, active = shape.permutation_words(rows, experts, block_m, True), min(experts, rows)
    assert words["work_tiles"] // 4 >= active + (rows - active) // block_m
    assert words["narrow_tiles"] // 4 >= active


def test_ctas_of_a_permutation_have_rows_enough() -> None:
    assert [shape.sorting_ctas(rows) for rows in (2048, 2049, 10_000, 10**6)] == [0, 2, 9, 32]


ARCHIVES = [pytest.param(t, name, id=f"{t.name}-{name}") for t in TARGETS.values() for name in t.archives]
BUILT = [pytest.param(t, unit, id=f"{t.name}-{unit}") for t in TARGETS.values() for unit in t.units]


@pytest.mark.parametrize(("target", "name"), ARCHIVES)
def test_compiled_from_these_sources(target: Target, name: str) -> None:
    expected = {build.cubin_name(unit, target, build.sources()) for unit in target.archives[name]}
    cubins = modules.read_archive(modules.archive_path(name, target))
    assert set(cubins) == expected, "run scripts/build-kernels and commit what it made"
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins.values())


@pytest.mark.parametrize(("target", "unit"), BUILT)
def test_a_unit_has_the_kernels_of_the_table(target: Target, unit: str) -> None:
    around = {
        "slots": {"place_experts", "fetch_experts"},
        "permute": {
            "permutation_one_warp", "permutation_one_cta", "permutation_count", "permutation_many_ctas", "permute_x",
        },
        "finalize": {"finalize_f32", "finalize_bf16", "finalize_many_bf16"},
        "quantize": {
            "quantize_permuted", "quantize_rows", "quantize_whole_rows", "quantize_row_tiles",
        },
        "bits": {"move_bits"},
    }  # fmt: skip
    gemms = {
        f.unit(format): {
            f.kernel(part, block_m, v) for part in f.parts for block_m in f.tiles for v in f.variants(part)
        }
        for f in KERNEL_FAMILIES.values()
        for format in f.formats
    }
    assert names(unit, target) == {**gemms, **around}[unit]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The sources in another folder, from which hashes are taken."""
    shutil.copytree(SOURCES, tmp_path / "cuda", ignore=shutil.ignore_patterns("cubins", "*.py"))
    monkeypatch.setattr(build, "_HERE", tmp_path / "cuda")
    return tmp_path / "cuda"


def test_a_hash_changes_with_what_the_unit_includes(copied: Path) -> None:
    before = {unit: build.source_hash(unit, SM90, build.sources()) for unit in SM90.units}
    for path, changed in (
        ("gemm/w8a8.cuh", {"w8a8_fp8_block128", "w8a8_channel_fp8_channel"}),
        ("dequant/int4.cuh", {unit for unit in SM90.units if unit.startswith(("w4a16", "w8a16"))}),
        ("ptx/griddepcontrol.cuh", set(SM90.units)),
    ):
        text = (copied / path).read_text()
        (copied / path).write_text(text + "\nconstexpr int kMore = 1;\n")
        now = {unit: build.source_hash(unit, SM90, build.sources()) for unit in SM90.units}
        assert {unit for unit in SM90.units if now[unit] != before[unit]} == changed
        (copied / path).write_text(text)


def test_a_hash_does_not_change_with_comments_and_white_space(copied: Path) -> None:
    before = build.source_hash("permute", SM90, build.sources())
    path = copied / "permute.cu"
    path.write_text("// Another comment.\n\n" + path.read_text().replace("    ", "\t"))
    assert build.source_hash("permute", SM90, build.sources()) == before


def test_a_hash_does_not_change_with_code_for_other_gpus(copied: Path) -> None:
    sm80, path = TARGETS["sm80"], copied / "ptx/griddepcontrol.cuh"
    before, text = [build.source_hash("slots", t, build.sources()) for t in (sm80, SM90)], path.read_text()
    for own, changed in (("launch_dependents() {}", [True, False]), ("griddepcontrol.wait;", [False, True])):
        assert own in text
        path.write_text(text.replace(own, f"{own} ;"))
        now = [build.source_hash("slots", t, build.sources()) for t in (sm80, SM90)]
        assert [a != b for a, b in zip(now, before, strict=True)] == changed


def test_missing_files_say_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(modules.DriverError, match=r"around\.tar\.xz: .*got no file: run scripts/build-kernels"):
        modules.read_cubin("permute", replace(SM90, folder=tmp_path))
    (tmp_path / "around.tar.xz").write_bytes(build.archive({"slots.hash.cubin": b""}))
    with pytest.raises(modules.DriverError, match=r"expects a cubin of permute, got none: run scripts/build-kernels"):
        modules.read_cubin("permute", replace(SM90, folder=tmp_path))


@pytest.mark.parametrize("damage", [lambda code: code[:-100], lambda code: code[:100] + b"0" + code[101:]])
def test_a_damaged_file_says_which(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = modules.archive_path("around", SM90)
    (tmp_path / path.name).write_bytes(damage(path.read_bytes()))
    with pytest.raises(modules.DriverError, match=f"{path.name}: expects an archive.*install polymoe again"):
        modules.read_cubin("permute", replace(SM90, folder=tmp_path))


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


@pytest.mark.parametrize("chained", [True, False])
def test_launches_are_chained_where_the_gpu_can(monkeypatch: pytest.MonkeyPatch, chained: bool) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    counts: list[int] = []
    library = SimpleNamespace(cuLaunchKernelEx=lambda config, *rest: counts.append(config._obj.count) or 0)
    driver.Kernel(library, ctypes.c_void_p(), "k", chained=chained).prepare(args.PermuteArgs(), 32)(0)
    assert counts == [int(chained)]


FORMATS = list(W4_FORMATS)


@pytest.mark.parametrize("format", [*FORMATS, "mxfp8"])
@pytest.mark.parametrize("gated", [True, False])
def test_every_configuration_has_its_kernels(format: str, gated: bool) -> None:
    problem = problem_of(random_experts(format, hidden=256, intermediate=128, gated=gated))
    configs = Cuda().tuning_configs(problem, Machine.of("h200"), 1)
    ordered = 0 if format == "mxfp8" else len(W4A16_MMA_ORDERED.tiles)
    assert len(configs) == len(W4A16_MMA.tiles) + ordered + len(W4A16_WGMMA.tiles) + 4
    for config in configs:
        assert isinstance(config, CudaConfig)
        for part, block_m in (
            ("gate_up" if gated else "up", config.block_m),
            ("down", config.down_block_m or config.block_m),
        ):
            family = config.kernels
            variant = family.pipeline(SM90.budget, format, part, block_m, 128 if part == "down" else 256).variant
            assert family.kernel(part, block_m, variant) in names(family.unit(format))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_x_that_fit_beside_the_stages(format: str) -> None:
    """Where whole rows of x are in shared memory: 7168 columns leave room for three stages, 14336 do not."""
    assert W4A16_MMA.fits(SM90.budget, format, "gate_up", 8, 7168)
    assert not W4A16_MMA.fits(SM90.budget, format, "gate_up", 8, 14336)


@pytest.mark.parametrize("format", FORMATS)
def test_short_k_has_kernels_of_its_own(format: str) -> None:
    """Where a stage has all columns of the down projection, and shared memory a stage for each team of warps."""
    for target in (TARGETS[name] for name in ("sm90", "sm100", "sm120")):
        found = [W4A16_MMA.pipeline(target.budget, format, "down", 8, k).variant for k in (256, 272, 512, 528)]
        assert found == ["k256", *(["n64"] * 2 if target.name == "sm120" else ["k512"] * 2), "n64"]
        assert W4A16_MMA.pipeline(target.budget, format, "gate_up", 8, 256).variant == "n64"


LEAST_STAGES = {"w4a8_rows": 6, "w8a8": 4, "w8a8_channel": 4}
"""To hide the latency of memory. Elsewhere three; kernels for few rows, whose warps copy for themselves, have their own
number."""


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        pytest.param(family, rows, id=f"{family.name}-{rows}")
        for family in KERNEL_FAMILIES.values()
        if family.name in SM90.families
        for rows in family.tiles
    ],
)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, family: KernelFamily, rows: int) -> None:
    """On a CPU, with launches recorded instead of made: kernels that there are, on every SM, in the shared memory that
    there is."""
    config, mode = CudaConfig(family.name, rows, *family.block_ns), family.activations[0]
    made, _ = launches(monkeypatch, next(iter(family.formats)), config, sizes=(384, 256), activations=mode)
    gemms = [launch for launch in made if launch.name.startswith(family.name)]
    format = next(iter(family.formats))
    variants = [
        (part, family.pipeline(SM90.budget, format, part, rows, k).variant)
        for part, k in (("gate_up", 384), ("down", 256))
    ]
    assert [launch.name for launch in gemms] == [family.kernel(part, rows, variant) for part, variant in variants]
    for launch in gemms:
        assert launch.grid == (132, 1)
        assert launch.threads <= 1024
        assert 16 * 1024 < launch.shared <= SM90.budget.shared_bytes  # the emulator checks that a kernel stays inside
        if rows > 8:
            assert launch.args["stages"] >= LEAST_STAGES.get(family.name, 3)
    assert made[-1].grid == (10, 1)  # tokens come first: more than 65535 CTAs fit only there


@pytest.mark.parametrize("format", DISASSEMBLED)
@pytest.mark.parametrize("part", W4A16_MMA.parts)
def test_instructions_that_eight_weights_cost(format: str, part: str) -> None:
    """Decoding time is instructions: at 4.3 TB/s there are 30 issue slots for eight weights of each lane."""
    for variant in W4A16_MMA.variants(part):
        found = instructions().disassembled(W4A16_MMA.unit(format), W4A16_MMA.kernel(part, 8, variant))
        assert not any(re.match(r"(LDL|STL)", text) for _, text in found), f"{variant} spills"
    cost = instructions().mma_costs(format, part, 8)
    assert [*cost] == [8]
    assert cost[8] <= MMA_COSTS[format]


@pytest.mark.parametrize("format", DISASSEMBLED)
@pytest.mark.parametrize("part", W4A16_WGMMA.parts)
@pytest.mark.parametrize("block_m", W4A16_WGMMA.tiles)
def test_mma_runs_while_weights_are_dequantized(format: str, part: str, block_m: int) -> None:
    """Where ptxas cannot see that registers are safe, each wgmma waits for itself: every one then ends a group (gsb0),
    and none stays in flight. Where they are short, what a warp shares is in uniform registers, not moved there each
    time."""
    tile = W4A16_WGMMA.tiles[block_m]
    inner = instructions().wgmma_loops(format, part, block_m)
    assert len(inner) >= len(tile.widths) + 1
    for body in inner:
        products = [t for t in body if t.startswith("HGMMA")]
        ends = [t for t in products if "gsb0" in t]
        assert len(products) == 2 * tile.n_blocks * len(ends)
        waits = [t for t in body if re.search(r"DEPBAR.*gsb0, 0x1", t)]
        assert len(waits) == len(ends)  # one after each successor
        assert not any(re.match(r"(LDL|STL)" if block_m > 128 else r"(LDL|STL|R2UR)", t) for t in body)
    assert max(instructions().wgmma_costs(format, part, block_m).values()) <= (32 if block_m > 128 else 29)


@pytest.mark.slow
@pytest.mark.parametrize("format", [*FORMATS, "mxfp8"])
def test_recorded_instructions_are_those_of_the_kernels(format: str) -> None:
    """If they are not: python benchmarks/cuda_instructions.py benchmarks/results/cuda-instructions.md."""
    recorded = Path(__file__).parents[2] / "benchmarks/results/cuda-instructions.md"
    formats, _, *rows = map(_cells, recorded.read_text(encoding="utf-8").splitlines())
    assert formats[2:] == list(instructions().FORMATS)
    column = formats.index(format)
    _, _, *found = map(_cells, instructions().table((format,)).splitlines())
    assert found == [[*row[:2], row[column]] for row in rows if row[column]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
