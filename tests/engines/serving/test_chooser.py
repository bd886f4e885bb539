"""Whose method runs a layer: reasons of the engine and of the user, and errors of polymoe's own."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from polymoe.engines.serving.chooser import LayerChooser
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerFacts
from polymoe.engines.serving.take_over import TakenOver
from polymoe.errors import ArgumentError, PlanError, UnsupportedProblem
from polymoe.layer import host_store, runtime
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.verdict import Reasons
from support.ranks import Ranks
from support.stacked import facts_of


class Method:
    pass


def choose(
    settings: EngineSettings,
    *,
    refused: str = "",
    facts: LayerFacts | None = None,
    create: Any = None,
    ranks: Any = None,
    chooser: LayerChooser | None = None,
) -> Any:
    reasons = Reasons()
    reasons.need(not refused, refused)
    chooser = chooser or LayerChooser("Engine", settings, LayerLog("Engine", "engine.polymoe", settings, ()))
    return chooser.choose(
        "layers.1",
        reasons,
        create or (lambda: "created"),
        lambda created: (Method(), facts or facts_of("sums-gpt-oss-mxfp4"), created),
        TakenOver,
        device="cpu",
        role="decode",
        load_format="dummy",
        first_rank=True,
        ranks=ranks,
    )


def test_a_layer_that_polymoe_runs() -> None:
    method = choose(EngineSettings())
    assert type(method).__name__ == "Method"
    assert method.dummy
    assert method.plan.selection.role == "decode"
    assert choose(EngineSettings(role="prefill")).plan.selection.role == "prefill"


def test_layers_of_one_kind_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Problem] = []

    def select(problem: Problem, *args: Any, **kwargs: Any) -> Selection:
        planned.append(problem)
        return select_them(problem, *args, **kwargs)

    select_them = runtime.select
    monkeypatch.setattr(runtime, "select", select)
    settings = EngineSettings()
    chooser = LayerChooser("Engine", settings, LayerLog("Engine", "engine.polymoe", settings, ()))
    methods = [choose(settings, chooser=chooser) for _ in range(3)]
    assert len(planned) == 1
    assert len({id(method.plan.selection) for method in methods}) == 1
    facts = facts_of("sums-gpt-oss-mxfp4", top_k=3)
    assert choose(settings, chooser=chooser, facts=facts).plan.selection.problem.top_k == 3
    assert len(planned) == 2


def test_memory_for_experts_is_divided_among_the_layers_of_a_model() -> None:
    method = choose(EngineSettings(expert_memory="6slots"))
    assert method.slots() == 6
    assert choose(EngineSettings()).slots is None
    spec = method.plan.problem.spec
    memory = f"{(2 * spec.local_bytes + 8.5 * spec.local_bytes / spec.local_experts) / 2**20}MiB"
    settings = EngineSettings(expert_memory=memory)
    with pytest.raises(ArgumentError, match="POLYMOE_EXPERT_MEMORY: expected less than all experts take"):
        choose(settings).slots()  # one layer
    chooser = LayerChooser("Engine", settings, LayerLog("Engine", "engine.polymoe", settings, ()))
    methods = [choose(settings, chooser=chooser) for _ in range(4)]
    assert [method.slots() for method in methods] == [2] * 4
    assert choose(settings, chooser=chooser).slots() == 2  # a draft model's
    with pytest.raises(ArgumentError, match="POLYMOE_EXPERT_MEMORY: expected 32slots"):
        choose(EngineSettings(expert_memory="some"))


def test_a_host_without_memory_for_all_experts_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "host_memory", lambda: (1000, 2000))
    method = choose(EngineSettings(expert_memory="6slots"))
    for _ in range(2):
        with pytest.raises(PlanError, match="for all experts of 1 layers, got 1000 B free of 2"):
            method.slots()


def test_only_the_first_layer_of_a_kind_is_checked() -> None:
    method = choose(EngineSettings())
    assert [method.first_of_its_kind(method.plan) for _ in range(2)] == [True, False]


def fails() -> Any:
    raise KeyError("w13")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"refused": "LoRA", "create": fails}, "LoRA: not supported"),
        ({"create": fails}, "KeyError: expects a layer that Engine's method takes, got 'w13'"),
        ({"facts": replace(facts_of("sums-gpt-oss-mxfp4"), method="Other")}, "method: expects one of"),
    ],
)
def test_reasons_why_the_engine_keeps_a_layer(
    given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(EngineSettings(), **given) is None
    (record,) = caplog.records
    assert record.getMessage().partition(" to Engine: ")[2].startswith(said)
    with pytest.raises(UnsupportedProblem, match="POLYMOE=require"):
        choose(EngineSettings(mode="require"), **given)


def test_errors_of_our_own_are_no_reasons() -> None:
    with pytest.raises(AttributeError):
        choose(EngineSettings(), facts="nonsense")  # type: ignore[arg-type]


def test_ranks_that_plan_alike() -> None:
    ranks = Ranks()
    for _ in range(2):
        assert choose(EngineSettings(), ranks=ranks) is not None
    assert len(ranks.said) == 2


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"settings": EngineSettings(activations="fp8_token")}, "rank 0: .*16bit activations.*rank 1: .*fp8_token"),
        ({"settings": EngineSettings(role="prefill")}, "rank 1: .*role prefill"),
        ({"settings": EngineSettings(), "refused": "LoRA"}, "rank 1: polymoe does not run them"),
        ({"settings": EngineSettings(mode="require"), "refused": "LoRA"}, "rank 1: polymoe does not run them"),
    ],
)
def test_a_rank_that_plans_otherwise_is_refused(other: dict[str, Any], says: str) -> None:
    ranks = Ranks()
    choose(EngineSettings(), ranks=ranks)
    with pytest.raises(PlanError, match=r"layers\.1: expected the same plan on all ranks") as error:
        choose(**other, ranks=ranks)
    assert re.search(says, str(error.value), re.DOTALL), error.value


def test_ranks_may_have_other_numbers_of_experts() -> None:
    """Not in a row, so that each rank plans with its own as if they were all."""
    ranks, facts = Ranks(), facts_of("sums-gpt-oss-mxfp4", first_expert=None, ep=2)
    few = replace(facts, tensors={n: t[:3] for n, t in facts.tensors.items()})
    for given in (facts, few):
        assert choose(EngineSettings(), facts=given, ranks=ranks).plan.mapped
