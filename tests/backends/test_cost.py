"""The floor, against figures for drawn uniform routings on an H200 (4.58 TB/s, 790 TFLOP/s): within 2 % of these."""

from __future__ import annotations

import pytest

from polymoe.backends.cost import cost
from polymoe.formats import FORMATS
from polymoe.machine import DEVICES
from polymoe.problem import Problem
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.tensors import ExpertsSpec


def problem(
    format: str, hidden: int, intermediate: int, experts: int, top_k: int, *, gated: bool = True, **kwargs: object
) -> Problem:
    e = FORMATS[format].encoding
    spec = ExpertsSpec(
        hidden=hidden, intermediate=intermediate, experts=experts, gate=e if gated else None, up=e, down=e
    )
    return Problem(spec=spec, activation=SwiGLU() if gated else ReLU2(), top_k=top_k, **kwargs)  # type: ignore[arg-type]


V4_FLASH = problem("mxfp4", 4096, 2048, 256, 6)


@pytest.mark.parametrize(
    ("tokens", "floor_us"),
    [(1, 17.6), (2, 35.0), (16, 240.5), (64, 587.4), (256, 747.4), (1024, 750.9), (4096, 1565.8), (8192, 3131.5)],
)
def test_floor_of_deepseek_v4_flash(tokens: int, floor_us: float) -> None:
    assert cost(V4_FLASH, DEVICES["h200"], tokens, (0.0,)).floor_us == pytest.approx(floor_us, rel=2e-2)


def test_fp8_activations_use_the_fp8_rate() -> None:
    fp8 = problem("mxfp4", 4096, 2048, 256, 6, activations="fp8_group128")
    assert cost(fp8, DEVICES["h200"], 8192).compute_us == pytest.approx(
        cost(V4_FLASH, DEVICES["h200"], 8192).compute_us / 2
    )
    assert cost(fp8, DEVICES["a100"], 64).compute_us == cost(V4_FLASH, DEVICES["a100"], 64).compute_us


@pytest.mark.parametrize(("tokens", "floor_us"), [(1, 9.6), (64, 267.9), (1024, 314.1)])
def test_floor_of_deepseek_v3_tp8(tokens: int, floor_us: float) -> None:
    p = problem("fp8_block128", 7168, 256, 256, 8, activations="fp8_group128")
    assert cost(p, DEVICES["h200"], tokens, (0.0,)).floor_us == pytest.approx(floor_us, rel=2e-2)


def test_experts_without_a_gate_have_two_matrices() -> None:
    p = problem("nvfp4", 1024, 2688, 512, 22, gated=False)
    c = cost(p, DEVICES["h200"], 1)
    assert c.active_experts == pytest.approx(22)
    assert c.weight_bytes == pytest.approx(22 * (2 * 1024 * 2688 * 0.5625 + 8))
    assert c.flops == 2 * 22 * 2 * 1024 * 2688


def test_expert_parallel_ranks_share_the_rows() -> None:
    e = FORMATS["mxfp4"].encoding
    spec = ExpertsSpec(hidden=64, intermediate=64, experts=8, gate=e, up=e, down=e, first_expert=2, local_experts=2)
    part = cost(Problem(spec=spec, activation=SwiGLU(), top_k=2), DEVICES["cpu"], 10)
    whole = cost(problem("mxfp4", 64, 64, 8, 2), DEVICES["cpu"], 10)
    assert part.flops == pytest.approx(whole.flops / 4)
    assert part.active_experts == pytest.approx(whole.active_experts / 4)


def test_more_experts_per_token_than_experts() -> None:
    assert cost(problem("bf16", 64, 64, 2, 4), DEVICES["cpu"], 3).active_experts == 2
