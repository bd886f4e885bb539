"""Kernels for weights that are not decoded: compiled as the backend asks for them, and called as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda import compiled
from polymoe.kernels.cuda.sizes import BF16, MAX_STAGES, SHARED_BYTES
from support.cuda_calls import launches, names

SOURCES = Path(compiled.__file__).parent


def test_shapes_are_those_of_the_source() -> None:
    pattern = r"POLYMOE_WHOLE\(whole_##KIND##_(\d+), (\d+), (\d+), (\d+), \d+, (\d+), MATRIX\)"
    found = [tuple(map(int, line)) for line in re.findall(pattern, (SOURCES / "whole_bf16.cuh").read_text())]
    assert all(rows == most for rows, _, _, most, _ in found)
    shapes = {rows: (s.warpgroups, s.n_blocks, s.k_blocks) for rows, s in BF16.tiles.items()}
    assert {rows: (w, g, b) for rows, w, g, _, b in found} == shapes


@pytest.mark.parametrize("rows", BF16.tiles)
def test_every_configuration_has_its_kernels(rows: int) -> None:
    assert {f"whole_{kind}_{rows}" for kind in ("gated", "plain", "down")} <= names("whole_bf16")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", BF16.tiles)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, rows: int, gated: bool) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    made, _ = launches(monkeypatch, "bf16", CudaConfig("bf16", rows), gated)
    products = [f"whole_{part}_{rows}" for part in ("gated" if gated else "plain", "down")]
    assert [name for name, *_ in made] == ["dispatch_few", "spread", *products, "combine_narrow"]
    (_, up, *_), (_, down, *_) = made[2:4]
    assert (up["n"], up["k"]) == ((544 if gated else 272), 336)
    assert (down["n"], down["k"]) == (336, 272)
    for _, args, grid, threads, shared in made[2:4]:
        assert grid == (132, 1)
        tile = BF16.tiles[rows]
        assert threads == tile.warpgroups * 128 + 128
        assert 3 <= args["stages"] <= MAX_STAGES
        assert args["stages"] * 128 * (tile.block_n + rows) * tile.k_blocks + 1024 == shared <= SHARED_BYTES
