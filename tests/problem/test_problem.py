from __future__ import annotations

from dataclasses import replace

import pytest

from polymoe.errors import ArgumentError
from polymoe.formats import FORMATS
from polymoe.problem import Problem
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.tensors import ExpertsSpec

MXFP4, FP8 = FORMATS["mxfp4"].encoding, FORMATS["fp8_block128"].encoding
SPEC = ExpertsSpec(hidden=2880, intermediate=2880, experts=32, gate=MXFP4, up=MXFP4, down=MXFP4, bias=True)
PROBLEM = Problem(spec=SPEC, activation=SwiGLU(1.702, 1.0, 7.0), top_k=4)


def test_equal_problems_share_a_plan() -> None:
    again = Problem(spec=replace(SPEC), activation=SwiGLU(1.702, 1.0, 7.0), top_k=4)
    assert again == PROBLEM
    assert {PROBLEM: "plan"}[again] == "plan"


@pytest.mark.parametrize(
    "change",
    [
        {"spec": replace(SPEC, hidden=2944)},
        {"spec": replace(SPEC, down=FP8)},
        {"activation": SwiGLU()},
        {"top_k": 2},
        {"weight_on": "input"},
        {"dtype": "fp16"},
        {"activations": "fp8_token"},
        {"tp": 2},
        {"ep": 2},
        {"batch_invariant": True},
    ],
    ids=lambda c: next(iter(c)),
)
def test_everything_counts(change: dict[str, object]) -> None:
    assert replace(PROBLEM, **change) != PROBLEM  # type: ignore[arg-type]


def test_problems_do_not_change() -> None:
    with pytest.raises(AttributeError):
        PROBLEM.top_k = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_on": "inputs"}, r"Problem\.weight_on: got 'inputs'\n  hint: did you mean 'input'\?"),
        ({"dtype": "float16"}, r"Problem\.dtype: got 'float16'\n  hint: .*known: bf16, fp16, fp32"),
        ({"activations": "fp8_block"}, r"activations: got 'fp8_block'\n  hint: did you mean 'fp8_"),
        ({"top_k": 0}, r"Problem\.top_k: expected at least 1, got 0"),
        ({"tp": 0}, r"Problem\.tp: expected at least 1, got 0"),
        ({"batch_invariant": "yes"}, r"batch_invariant: expected True or False, got 'yes'"),
        ({"ep": -1}, r"Problem\.ep: expected at least 1, got -1"),
        ({"activation": ReLU2()}, r"Problem\.activation: .*got relu2 with a gate projection"),
        ({"spec": replace(SPEC, gate=None)}, r"Problem\.activation: .*got swiglu\(.*\) with no gate projection"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(PROBLEM, **change)  # type: ignore[arg-type]


def test_more_active_experts_than_there_are_is_no_contradiction() -> None:
    assert replace(PROBLEM, top_k=33).top_k == 33  # ids may repeat


def test_str() -> None:
    activation = "swiglu(alpha=1.702, beta=1, limit=7)"
    assert str(PROBLEM) == f"mxfp4, H=2880 F=2880 E=32 A=4, {activation}, bias, x bf16"
    spec = replace(SPEC, bias=False, gate=None, down=FP8, first_expert=16, local_experts=8)
    other = Problem(
        spec=spec, activation=ReLU2(), top_k=22, weight_on="input", activations="fp8_static", dtype="fp16", tp=2, ep=4
    )
    assert str(other) == (
        "mxfp4/fp8_block128, H=2880 F=2880 E=32 (8 from 16) A=22, relu2, "
        "weight on input, x fp16 as fp8_static, tp=2, ep=4"
    )
