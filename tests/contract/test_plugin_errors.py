"""A backend or layout of another package that raises is rejected with its exception; one of ours that does is a bug."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polymoe.backends.base import Prediction
from polymoe.common import plugins
from polymoe.errors import UnsupportedProblem
from polymoe.machine import Machine
from polymoe.planning.measured import Table, problem_key
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.verdict import Accepted, Rejected
from support import table_rows
from support.problems import problem_of, random_experts
from support.toys import HANDLES, LAYOUTS, Flipped, Toy


def broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("broken")


def breaking(what: str) -> tuple[Toy, Flipped]:
    """A backend and its layout, one of which raises when ``what`` is asked of it."""
    kind: type[Toy] = type("Theirs", (Toy,), {})
    layout: type[Flipped] = type("TheirLayout", (Flipped,), {})
    if what == "layout":
        layout.check = broken  # type: ignore[method-assign]
    elif what == "no verdict":
        kind.check = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    elif what == "predict, for 512 tokens":

        def predict(self: Toy, problem: Problem, machine: Machine, tokens: int) -> Prediction:
            return broken() if tokens == 512 else Toy.predict(self, problem, machine, tokens)

        kind.predict = predict  # type: ignore[method-assign]
    elif what in ("handles", "layouts"):
        setattr(kind, what, property(broken, lambda *_: None))
    else:
        setattr(kind, what, broken)
    return kind("theirs", layouts=("theirs",), handles=HANDLES), layout("theirs")


LATE = "predict, for 512 tokens"
"""A question of plans, not of verdicts."""
WHAT = ["check", "handles", "layouts", "configure", "predict", "tuning_configs", "layout", "no verdict", LATE]
RAISED = r"(ZeroDivisionError: broken|TypeError: check returned None, not a verdict)"


def asked(theirs: Toy, layout: Flipped, backend: str, table: Table | None = None) -> Selection:
    return select(
        problem_of(random_experts()),
        Machine.of("cpu"),
        backend=backend,
        backends={"ours": Toy("ours"), "theirs": theirs},
        layouts={**LAYOUTS, "theirs": layout},
        table=table or Table(),
    )


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As if an entry point gave a backend and a layout."""
    return lambda *given: monkeypatch.setattr(plugins, "_found", [plugins.Plugin("p", given[:1], given[1:])])


def require_rejected(selection: Selection) -> None:
    ours, theirs = selection.candidates
    assert isinstance(ours.verdict, Accepted)
    assert isinstance(theirs.verdict, Rejected)
    (reason,) = theirs.verdict.reasons
    assert reason.what.endswith("plug-in")
    assert re.fullmatch(RAISED, reason.got)


@pytest.mark.parametrize("what", [what for what in WHAT if what != LATE])
def test_auto_takes_another(what: str, register: Any) -> None:
    theirs = breaking(what)
    register(*theirs)
    with pytest.warns(UserWarning, match=f"plug-in 'theirs' of polymoe.backends is not used: {RAISED}"):
        selection = asked(*theirs, "auto")
    require_rejected(selection)
    assert {step.backend for step in selection.require().steps} == {"ours"}


def test_auto_takes_another_where_it_raises_while_it_is_planned(register: Any) -> None:
    """It was measured the faster one at 1024 tokens, which is asked of 512 too."""
    theirs, layout = breaking(LATE)
    theirs = replace(theirs, layouts=("flipped",))
    register(theirs, layout)
    key = problem_key(problem_of(random_experts()))
    measured = table_rows.row(1024, 1e-9, backend="theirs", problem=key, config={"tile": 16}, device="cpu")
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        selection = asked(theirs, layout, "auto", Table(((measured,),)))
    require_rejected(selection)
    assert {step.backend for step in selection.require().steps} == {"ours"}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.filterwarnings("ignore:plug-in")
def test_a_named_one_is_refused_with_its_exception(what: str, register: Any) -> None:
    theirs = breaking(what)
    register(*theirs)
    with pytest.raises(UnsupportedProblem, match=f"theirs: .*plug-in: expects an answer, got {RAISED}"):
        asked(*theirs, "theirs").require()


@pytest.mark.parametrize("what", WHAT)
def test_an_exception_of_ours_is_a_bug(what: str) -> None:
    with pytest.raises((ZeroDivisionError, TypeError), match=r"broken|not a verdict"):
        asked(*breaking(what), "theirs")
