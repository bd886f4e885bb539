"""docs/adding-a-backend.md is true: its example runs, and it names the protocol's methods and the files there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from polymoe.backends.base import Backend
from polymoe.backends.judge import judge
from polymoe.bench.cases import CASES
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.verdict import Accepted, Rejected
from support.problems import plain_experts, problem_of, random_call, random_experts

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/adding-a-backend.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dense() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {"__name__": "polymoe_example"}
    exec(compile(code, "docs/adding-a-backend.md", "exec", dont_inherit=True), names)
    return names["Dense"]()


def methods() -> set[str]:
    return {name for name in vars(Backend) if not name.startswith("_")} - {"name", "layouts", "handles"}


def test_every_method_has_its_row(dense: Any) -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == methods() | {"run"}
    assert methods() <= set(dir(dense))


@pytest.mark.parametrize("tokens", [1, 17, 100])
def test_the_example_is_right(dense: Any, tokens: int) -> None:
    weights = random_experts(bias=True)
    choice = PlanRequest(Machine.of("cpu"), "mixed", "dense", {"dense": dense}, LAYOUTS)
    experts = FusedExperts.pack(problem_of(weights), weights, choice)
    x, routing = random_call(tokens, 64, 5)
    expected = plain_experts(weights, experts.problem, x, routing)
    assert relative_error(experts(x, *routing), expected) < TOLERANCE
    routing.topk_ids_TA[0] = -1
    assert not experts(x, *routing)[0].any()


def test_the_example_says_what_it_takes(dense: Any) -> None:
    problem, machine = CASES["gpt-oss-20b"].problem(), Machine.of("h200")
    assert dense.check(problem, machine) == Accepted(max_tokens=256)
    quantized = CASES["gpt-oss-20b"].problem(activations="fp8_token")
    assert isinstance(judge(dense, quantized, machine), Rejected)
    (candidate,) = select(problem, machine, backends={"dense": dense}, backend="dense").candidates
    assert all(prediction.time_us > 0 for _, prediction in candidate.predictions)
    for tokens in (1, 100):
        found = dense.tuning_configs(problem, machine, tokens)
        assert found == (dense.configure(problem, machine, tokens),)
        assert not dense.tuning_configs(problem, machine, tokens, [(config, 1.0) for config in found])


def test_linked_and_named_files_exist() -> None:
    for name in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / name).exists(), name
    for name in re.findall(r"`((?:tests|benchmarks|src|scripts)/[\w./-]+)`", TEXT):
        assert "NAME" in name or (ROOT / name).exists(), name
