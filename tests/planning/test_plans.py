"""Plans of the named cases on an H200, as they are committed: a change of names or of thresholds shows here."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from polymoe.bench.cases import CASES
from polymoe.machine import Machine
from polymoe.planning.measured import Table
from polymoe.planning.select import select
from polymoe.planning.table_files import read

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
