"""Kernels for MXFP4 weights and few rows, which round x and h to E4M3: run on a CPU from their own sources."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda.sizes import W4A8_MMA
from polymoe.kernels.cuda.targets import SM90
from support.cuda_calls import compare_each_token, launches, run_emulated
from support.cuda_emulator import compile_unit
from support.problems import GPT_OSS, random_call, random_experts, with_input_scales

CONFIGS = [CudaConfig("w4a8_mma", rows, 64) for rows in W4A8_MMA.tiles]

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return {unit: compile_unit(unit) for unit in ("permute", "finalize", W4A8_MMA.unit("mxfp4"))}


@emulated
@every_config
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_configuration(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig, dtype: torch.dtype
) -> None:
    """K of half a stage's blocks, tiles that are not whole, zeros, experts with more rows than a work tile has, ids of
    other ranks, biases; each token with the reference. Up to 32 expanded rows are sorted by the GEMMs."""
    weights = with_input_scales(random_experts(hidden=320, intermediate=192, experts=2, bias=True))
    for tokens, mode in (
        (config.block_m + 5, "fp8_token"),
        (30, "fp8_static" if dtype == torch.float32 else "fp8_token"),
    ):
        x, routing = random_call(tokens, 320, 2, 2, dtype)
        x[5], x[6, :128] = 0, 0
        routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
        routing.topk_weights_TA[0, 0] = float("nan")
        made = compare_each_token(
            monkeypatch, libraries, weights, x, routing, config, blocks=2, coarse=False, activations=mode,
            activation=GPT_OSS,
        )  # fmt: skip
        gemms = [W4A8_MMA.kernel(part, config.block_m, "n64") for part in ("gate_up", "down")]
        assert made[-3:] == [*gemms, "finalize_f32"]
        assert (len(made) == 3) == (2 * tokens <= 32)


@emulated
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    weights = with_input_scales(random_experts(hidden=128, intermediate=64, experts=2))
    for mode, tokens in (("fp8_token", 20), ("fp8_static", 3)):
        x, routing = random_call(tokens, 128, 2, 2, torch.bfloat16)
        routing.topk_ids_TA[:] = -1
        out, _ = run_emulated(monkeypatch, libraries, weights, x, routing, CONFIGS[0], activations=mode)
        assert not out.any()


@every_config
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """On a CPU, with launches recorded instead of made: neither x nor h goes to a launch that rounds it."""
    made, _ = launches(monkeypatch, "mxfp4", config, sizes=(4160, 320), activations="fp8_token")
    up, down, finalize = made[-3:]
    assert down.args["x"] == up.args["out"]
    assert finalize.args["y"] == down.args["out"]
    assert (up.args["top_k"], down.args["top_k"]) == (3, 0)
    for gemm in (up, down):
        assert gemm.args["stages"] >= 3
        assert gemm.shared <= SM90.budget.shared_bytes


@pytest.mark.parametrize("part", W4A8_MMA.parts)
@pytest.mark.parametrize("rows", [8, 16])
def test_no_register_is_spilled(rows: int, part: str) -> None:
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    found = tools.disassembled(W4A8_MMA.unit("mxfp4"), W4A8_MMA.kernel(part, rows, "n64"))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found)
