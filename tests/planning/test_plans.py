"""Plans of the named cases on an H200, as they are committed: a change of names or of thresholds shows here."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch

from polymoe.backends.cost import ZIPF_EXPONENT, active_share, cost
from polymoe.bench.cases import CASES
from polymoe.bench.routings import RoutingDistribution
from polymoe.machine import Machine
from polymoe.planning.measured import Table, problem_key
from polymoe.planning.select import select
from polymoe.planning.table_files import read
from polymoe.problem.activation_quantization import ACTIVATIONS
from support.problems import problem_of, random_experts

GOLDEN = json.loads((Path(__file__).parent / "plans-h200.json").read_text(encoding="utf-8"))
SHIPPED = Table((tuple(read(resources.files("polymoe.planning") / "tables" / "h200.jsonl")),))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("activations", [None, "fp8_group128"])
def test_the_plan_is_the_committed_one(name: str, activations: str | None) -> None:
    """With the times that the package ships. Of Triton, which changes with its tuning, only the backend is compared."""
    problem = CASES[name].problem(None, activations)  # type: ignore[arg-type]
    plan = select(problem, Machine.of("h200"), role="mixed", table=SHIPPED).plan
    if plan is None:
        assert GOLDEN[name][activations or "own"] is None
        return
    steps: dict[str, str] = {}
    for tokens, step in plan.ranges():
        steps[tokens] = f"{step.backend}: {step.config}" if step.backend == "cuda" else step.backend
    found = {"layout": plan.layout, "steps": steps if plan.layout != "natural" else sorted(set(steps.values()))}
    assert found == GOLDEN[name][activations or "own"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("gpu", "activations"),
    [
        *(("h200", activations) for activations in (None, "16bit", "fp8_token", "fp8_group128")),
        ("a100", None),
        ("rtx5090", None),
    ],
)
def test_no_time_is_below_the_floor(name: str, activations: str | None, gpu: str) -> None:
    """Measured, interpolated, scaled or predicted: times and floors are of the same routings."""
    problem, machine = CASES[name].problem(None, activations), Machine.of(gpu)
    selection = select(problem, machine, role="mixed", table=SHIPPED)
    for candidate in selection.candidates:
        for tokens, found in candidate.predictions:
            assert selection.floor_us(tokens) <= found.time_us, (candidate.backend, tokens, found.source)
            # The experts of a few hundred drawn tokens differ from the mean that the floor counts.
            assert cost(problem, machine.device, tokens).floor_us <= 1.01 * found.time_us


def test_no_row_of_a_shipped_table_is_below_the_floor() -> None:
    problems = {
        problem_key(problem): problem
        for name in CASES
        for activations in (None, *ACTIVATIONS)
        for problem in [CASES[name].problem(None, activations)]
    }
    rows = [row for row in SHIPPED.sources[0] if row.problem in problems]
    assert len(rows) > 200
    for row in rows:
        floor = cost(problems[row.problem], Machine.of(row.device).device, row.tokens).floor_us
        assert floor <= 1.01 * row.median_us, (row.problem, row.tokens)


@pytest.mark.parametrize("exponent", [0.0, ZIPF_EXPONENT])
@pytest.mark.parametrize(("experts", "top_k"), [(256, 8), (128, 4), (8, 2), (512, 22)])
def test_active_experts_are_those_of_drawn_routings(exponent: float, experts: int, top_k: int) -> None:
    problem = problem_of(random_experts(experts=experts, hidden=32, intermediate=32), top_k=top_k)
    distribution, calls = RoutingDistribution("drawn", exponent), 60 if experts > 8 else 1000
    for tokens in (1, 7, 32, 200):
        drawn = [distribution.draw(tokens, problem, torch.device("cpu"), index=i).topk_ids_TA for i in range(calls)]
        mean = sum(len(ids.unique()) for ids in drawn) / calls
        assert experts * active_share(experts, top_k, tokens, exponent) == pytest.approx(mean, rel=0.03)
    assert active_share(experts, experts, 1, exponent) == 1
