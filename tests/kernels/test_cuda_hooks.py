"""Where adapters of experts will change sums: every family of kernels adds what hooks add, to the right columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.targets import SM90
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.tensors import Expert, ExpertWeights
from support.cuda_calls import run_emulated
from support.cuda_emulator import ARGS, compile_files, compile_units, emulated, sources
from support.problems import problem_of, random_call, random_experts

HOOKS = "epilogue/hooks.cuh"
ADDS = {
    "before_activation": "first += 0.25f * (at.first % 5) - 0.5f, second += 0.125f * (at.second % 7) + at.expert;",
    "after_down": "first += 0.25f * (at.first % 5) + at.expert, second += 0.25f * (at.second % 5) + at.expert;",
}
"""What they do here: as biases do that differ by column and expert."""


def _hooked(unit: str) -> object:
    """A unit whose hooks have these bodies."""
    files = sources()
    for name, body in ADDS.items():
        empty = f"{name}(const GemmArgs& args, SumsAt at, float& first, float& second) {{}}"
        assert files[HOOKS].count(empty) == 1
        files[HOOKS] = files[HOOKS].replace(empty, empty.replace("{}", f"{{ {body} }}"))
    return compile_files(files, SM90.units[unit], ARGS.get(unit, ("GemmArgs",)), f"{unit}_hooked")


@emulated
@pytest.mark.parametrize(
    ("format", "mode", "config"),
    [
        ("mxfp4", "16bit", CudaConfig("w4a16_mma", 8, 64)),  # epilogue/row_sums.cuh
        ("fp8_block128", "fp8_group128", CudaConfig("w8a8", 160)),  # epilogue/rows.cuh, as all below but the last
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                ("mxfp4", "16bit", CudaConfig("w4a16_wgmma", 64)),
                ("mxfp4", "fp8_group128", CudaConfig("w4a8", 32)),
                ("mxfp4", "fp8_token", CudaConfig("w4a8_rows", 32)),
                ("mxfp4", "fp8_token_fast_accumulation", CudaConfig("w4a8_rows_fast", 112)),
                ("fp8_block128", "fp8_group128", CudaConfig("w8a8_f16", 32)),
                ("bf16", "16bit", CudaConfig("bf16", 32)),
                ("fp8_block128", "fp8_group128", CudaConfig("w8a8_mma", 8)),
            )
        ),
    ],
    ids=str,
)
def test_hooks_see_each_sum_once(monkeypatch: pytest.MonkeyPatch, format: str, mode: str, config: CudaConfig) -> None:
    hidden, intermediate = 256, 256
    weights = random_experts(format, experts=3, hidden=hidden, intermediate=intermediate)

    def biased(e: int) -> Expert:
        column = torch.arange(256, dtype=torch.float32)
        fifths, sevenths = 0.25 * (column % 5), 0.125 * (column % 7)
        return replace(weights.expert(e), gate_bias=fifths - 0.5, up_bias=sevenths + e, down_bias=fifths + e)

    unit = config.kernels.unit(format)
    units: dict[str, Any] = {**compile_units(), unit: _hooked(unit)}
    x, routing = random_call(12, hidden, 3, 2, torch.bfloat16)
    out, _ = run_emulated(monkeypatch, units, weights, x, routing, config, activations=mode)
    same = ExpertWeights(replace(weights.spec, bias=True), biased)
    expected = run_experts(problem_of(same, activations=mode), same, x, routing)
    assert relative_error(out, expected) < TOLERANCE
    without = run_experts(problem_of(weights, activations=mode), weights, x, routing)
    assert relative_error(out, without) > 0.1
