"""Kernels for 4-bit weights and rows in E4M3: compiled as the backend asks for them, and called as they are written."""

from __future__ import annotations

import pytest

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda.spec import W4A8
from polymoe.kernels.cuda.targets import SM90
from support.cuda_calls import launches


@pytest.mark.parametrize("rows", W4A8.tiles)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory."""
    config = CudaConfig("w4a8", rows)
    made, tensors = launches(monkeypatch, "mxfp4", config, sizes=(4160, 320), activations="fp8_group128")
    assert [name for name, *_ in made] == [
        "permutation_one_warp",
        "quantize_permuted",
        *(W4A8.kernel(part, rows) for part in ("gate_up", "down")),
        "finalize_bf16",
    ]
    (_, x, x_grid, *_), (_, up, *_), (_, down, *_), (_, combine, *_) = made[1:]
    assert (x["columns"], x["top_k"], x["x_dtype"]) == (4160, 3, 1)  # float16, as it came
    assert x_grid == (10, 2)
    assert (x["out"], up["out"], down["out"]) == (up["x"], down["x"], combine["y"])
    assert (up["n"], up["k"]) == (640, 4160)
    assert (down["n"], down["k"]) == (4160, 320)
    assert up["codes_stride"] * 5 == tensors["up.codes"].numel()
    shape = W4A8.tiles[rows]
    for _, args, grid, threads, shared in made[2:4]:
        assert grid == (132, 1)
        assert threads == shape.warpgroups * 128 + 128
        assert args["stages"] >= 3
        assert shared <= SM90.budget.shared_bytes  # the emulator checks that a kernel stays inside
