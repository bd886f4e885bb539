"""The compiled Hopper kernels: made from these sources, with every kernel that the backend may ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polymoe.backends.hopper import Hopper
from polymoe.kernels.hopper import compiled, launch
from polymoe.machine import Machine
from problems import problem_of, random_experts


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
    with pytest.raises(compiled.DriverError, match=r"decode\.\*\.cubin.*got 0.*scripts/build-kernels"):
        compiled.cubin_path("decode")


def names(unit: str) -> set[str]:
    found = re.findall(rb"\.text\.([a-z0-9_]+)\0", compiled.cubin_path(unit).read_bytes())
    return {name.decode() for name in found}


@pytest.mark.parametrize("gated", [True, False])
def test_every_configuration_has_its_kernels(gated: bool) -> None:
    problem = problem_of(random_experts("mxfp4", hidden=256, intermediate=128, gated=gated))
    kind = "gated" if gated else "plain"
    configs = Hopper().candidates(problem, Machine.of("h200"), 1)
    assert len(configs) == 7
    for config in configs:
        wanted = f"{config.rows}_{config.height}" if config.kernels == "decode" else f"{config.rows}"
        for part in (kind, "down"):
            assert f"{config.kernels}_{part}_{wanted}" in names(config.kernels)
    assert {"dispatch", "spread", "combine"} <= names("rows")
    assert {c.rows for c in configs if c.kernels == "prefill"} == set(launch.PREFILL)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("columns", [192, 2048, 2880, 4096, 7168])
def test_rings_fit_into_shared_memory(rows: int, columns: int) -> None:
    stages, buffers, shared = launch._decode_ring(rows, columns)
    assert launch.decode_fits(rows, columns) == (stages >= 3)
    if launch.decode_fits(rows, columns):
        assert shared <= launch.SHARED_BYTES
        assert 1 <= buffers <= 2
        assert stages <= 16
    assert launch.decode_fits(8, 7168)
    assert not launch.decode_fits(16, 7168)
