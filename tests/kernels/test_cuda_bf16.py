"""Kernels for weights that are not decoded: compiled as the backend asks for them, and called as they are written."""

from __future__ import annotations

import pytest

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda.pipelines import MAX_STAGES
from polymoe.kernels.cuda.spec import BF16
from polymoe.kernels.cuda.targets import SM90
from support.cuda_calls import launches


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", BF16.tiles)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, rows: int, gated: bool) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory."""
    made, _ = launches(monkeypatch, "bf16", CudaConfig("bf16", rows), gated)
    gemms = [BF16.kernel(part, rows) for part in ("gate_up" if gated else "up", "down")]
    assert [name for name, *_ in made] == ["permutation_one_warp", *gemms, "finalize_bf16"]
    (_, up, *_), (_, down, *_) = made[1:3]
    assert (up["top_k"], down["top_k"]) == (3, 0)  # x is by token, h by permuted row
    assert (up["n"], up["k"]) == ((544 if gated else 272), 336)
    assert (down["n"], down["k"]) == (336, 272)
    for _, args, grid, threads, shared in made[1:3]:
        assert grid == (132, 1)
        tile = BF16.tiles[rows]
        assert threads == tile.warpgroups * 128 + 128
        assert 3 <= args["stages"] <= MAX_STAGES
        assert shared <= SM90.budget.shared_bytes  # the emulator checks that a kernel stays inside
