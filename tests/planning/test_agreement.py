"""Ranks of one group agree on their plans, or each of them refuses: by a function that gathers, and by gloo."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from polymoe.errors import PlanError
from polymoe.planning import agreement
from polymoe.planning.agreement import require_agreement
from polymoe.planning.selection import Selection
from support.problems import problem_of, random_experts
from support.toys import TileConfig, Toy, choice, toys

WEIGHTS = random_experts()
lacking = choice({"absent": Toy("absent", needs_package="toykernels")}).select(problem_of(WEIGHTS))
"""Without a plan."""


def selected(
    *backends: Any, intermediate: int | None = None, first: int | None = None, role: str = "mixed", **changes: Any
) -> Selection:
    problem = replace(problem_of(WEIGHTS), **changes)
    if intermediate is not None:
        problem = replace(problem, spec=replace(problem.spec, intermediate=intermediate))
    if first is not None:
        problem = replace(problem, spec=replace(problem.spec, first_expert=first, local_experts=2))
    return replace(choice(toys(*backends) if backends else toys()), role=role).select(problem)


def outcomes(*selections: Selection | None, slots: Sequence[int | None] = (None,)) -> list[str]:
    """What each rank says, all at the same time: "" for agreement. Ranks beyond those of ``slots`` have the last."""
    ranks, barrier = len(selections), threading.Barrier(len(selections))
    sent, said = [b""] * ranks, ["" for _ in selections]

    def run(rank: int) -> None:
        def gather(mine: bytes) -> Sequence[bytes]:
            sent[rank] = mine
            barrier.wait(10)
            return list(sent)

        try:
            require_agreement(selections[rank], gather, "layer 3", slots=slots[min(rank, len(slots) - 1)])
        except PlanError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_the_same_plan_on_all_ranks() -> None:
    assert outcomes(selected(), selected(), selected()) == ["", "", ""]
    assert outcomes(selected()) == [""]


def test_ranks_may_hold_other_experts() -> None:
    assert outcomes(selected(first=0), selected(first=2)) == ["", ""]


def test_ranks_with_parts_of_other_sizes_may_plan_otherwise() -> None:
    narrow = Toy("small", layouts=("natural",))
    assert outcomes(selected(), selected(), selected(narrow, intermediate=32)) == ["", "", ""]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            lambda: selected(Toy("small", layouts=("flipped",))),
            r"rank 0: layout flipped, 1-63 tokens: small .*rank 1: ",
        ),
        (lambda: selected(dtype="fp16"), r"rank 0: .*x bf16.*rank 1: .*x fp16"),
        (lambda: selected(activations="fp8_token"), "rank 1: .*(fp8_token activations|does not run them)"),
        (lambda: selected(role="decode"), "rank 1: .*role decode"),
        (lambda: selected(batch_invariant=True), "rank 1: .*(batch invariant|does not run them)"),
        (lambda: selected(tp=2), "rank 1: .*tp=2"),
        (lambda: lacking, "rank 1: polymoe does not run them, none:.*package toykernels"),
        (lambda: None, "rank 0: polymoe runs them.*rank 1: polymoe does not run them"),
    ],
)
def test_a_difference_is_refused_by_every_rank_and_named(other: Callable[[], Selection | None], says: str) -> None:

    first, second = outcomes(selected(), other())
    assert first == second
    assert first.startswith("layer 3: expected the same plan on all ranks of the group, got different ones:")
    assert re.search(says, first, re.DOTALL), first


def test_slots_count() -> None:
    assert outcomes(selected(), selected(), slots=(4, 4)) == ["", ""]
    for slots in ((4, 5), (4, None)):
        first, second = outcomes(selected(), selected(), slots=slots)
        assert first == second
        assert re.search("rank 0: polymoe runs them in 4 slots.*rank 1: polymoe runs them", first, re.DOTALL)


def test_ranks_that_agree_are_named_together() -> None:
    message = outcomes(selected(), selected(role="decode"), selected(), selected())[3]
    assert "\n  ranks 0, 2, 3: " in message
    assert "\n  rank 1: " in message


def test_configurations_count() -> None:
    class Wide(Toy):
        def configure(self, problem, machine, tokens):  # type: ignore[no-untyped-def]
            return TileConfig(128)

    first, _ = outcomes(selected(Toy("small")), selected(Wide("small")))
    assert "tile=128" in first


def _rank(rank: int, store: str, role: str, out: Any) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        try:
            if role == "absent":
                time.sleep(3)
                raise PlanError("absent")
            require_agreement(selected(role=role), dist.group.WORLD, "layer 3")
            out.put((rank, ""))
        except PlanError as error:
            out.put((rank, str(error)))
        dist.destroy_process_group()
    except Exception:
        out.put((rank, traceback.format_exc()))


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("mixed", "decode"), ("mixed", "absent")])
def test_two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, roles: tuple[str, str]) -> None:
    monkeypatch.setattr(agreement, "_WAIT", timedelta(seconds=1 if "absent" in roles else 60))
    start = multiprocessing.get_context("fork")
    out = start.Queue()
    ranks = [start.Process(target=_rank, args=(i, tmp_path / "store", role, out)) for i, role in enumerate(roles)]
    for rank in ranks:
        rank.start()
    said = dict(out.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    if roles[0] == roles[1]:
        assert said == {0: "", 1: ""}
    elif "absent" in roles:
        assert "expected all ranks of the group to plan it within 1 s, got " in said[0]
        assert re.search(r"[Rr]ank", said[0].partition(", got ")[2])
    else:
        assert said[0] == said[1]
        assert "rank 1: " in said[0]
        assert "role decode" in said[0]
