"""Experts that vLLM moves between ranks (EPLB), without vLLM: here the rows of two ranks are copied as vLLM does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polymoe.checkpoint import Checkpoint
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerPlan, judge_layer
from polymoe.engines.serving.take_over import TakenOver, take_over
from polymoe.engines.vllm import balancing
from polymoe.engines.vllm.balancing import let_experts_move, require_alike
from polymoe.errors import PlanError, UnsupportedProblem
from polymoe.layer.rows import rows_as_bytes
from polymoe.layer.runtime import PlanCache
from polymoe.problem.scale_range import ScaleRange
from support.ranks import Ranks
from support.stacked import BUNDLED, CPU, MODELS, experts_of, facts_of

CPU_DEVICE = torch.device("cpu")
RANKS = 2
COPIES = {5: 3, 6: 2, 8: 2, 16: 4}  # by the number of experts


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is patched in it."""
    monkeypatch.setattr(balancing, "_check_models", lambda: None)


class Method:
    """vLLM's, as far as it matters here."""


class Rank:
    """One rank's layer: of the experts in ``held``, of which a rank has every ``RANKS``-th part."""

    def __init__(self, model: str, held: list[int], rank: int) -> None:
        each = len(held) // RANKS
        mine = torch.tensor(held[rank * each : (rank + 1) * each])
        whole = experts_of(model, (0, 1), (0, 1))
        tensors = {name: tensor.index_select(0, mine) for name, tensor in whole.tensors.items()}
        problem = Checkpoint.open(MODELS / model).problem(BUNDLED[model].layer)
        facts = facts_of(
            model, tensors=tensors, experts=len(held), first_expert=rank * each, ep=RANKS, balanced=True,
            activation=problem.activation, weight_on=problem.weight_on, top_k=2,
        )  # fmt: skip
        plan = judge_layer(facts, CPU, EngineSettings())
        assert isinstance(plan, LayerPlan)
        self.layer: Any = nn.Module()
        self.layer.quant_method = self.method = take_over(
            Method(), TakenOver, plan, CPU, dummy=False, first_of_its_kind=lambda _: False, on_packed=lambda *_: None
        )
        weights = plan.experts_in(tensors).weights(plan.problem.spec)
        self.method.packed.pack(self.layer, weights, CPU_DEVICE, check=False)
        let_experts_move(self.method, self.layer)

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.method.run_experts(self.layer, x, ids, weights)

    def tensors(self) -> list[Tensor]:
        return self.method.packed.tensors(self.layer)

    def rows(self) -> list[Tensor]:
        """What vLLM gets."""
        return self.layer.get_expert_weights()


def move(ranks: list[Rank], held: list[int], wanted: list[int]) -> None:
    """Copy rows so that the ranks hold ``wanted``, in place, as vLLM does with what layers give it."""
    each = len(held) // RANKS
    rows = [rank.rows() for rank in ranks]
    before = [[tensor.clone() for tensor in mine] for mine in rows]
    for place, expert in enumerate(wanted):
        source = held.index(expert)
        for to, old in zip(rows[place // each], before[source // each], strict=True):
            to[place % each].copy_(old[source % each])


@pytest.mark.parametrize("model", BUNDLED)
def test_answers_are_the_same_after_experts_moved(model: str) -> None:
    """Bit for bit where one expert answers; the tensors of each rank are those of a rank that loads its new experts."""
    about, generator = BUNDLED[model], torch.Generator().manual_seed(0)
    held = [*range(about.experts), *range(COPIES[about.experts])]
    ranks = [Rank(model, held, rank) for rank in range(RANKS)]
    addresses = [[tensor.data_ptr() for tensor in rank.tensors()] for rank in ranks]
    x = torch.randn(about.experts, about.hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(about.experts, generator=generator)[:2] for _ in x])
    weights = torch.rand(ids.shape, generator=generator)

    def answers(held: list[int]) -> tuple[Tensor, Tensor]:
        """One expert for each token, and two."""
        place = torch.tensor([held.index(e) for e in range(about.experts)])
        alone = [rank.run(x, place[:, None], torch.ones(len(x), 1)) for rank in ranks]
        return torch.stack(alone).sum(0), torch.stack([rank.run(x, place[ids], weights) for rank in ranks]).float().sum(
            0
        )

    alone, both = answers(held)
    for seed in (1, 2):
        order = torch.randperm(len(held), generator=generator.manual_seed(seed)).tolist()
        wanted = [held[place] for place in order]
        move(ranks, held, wanted)
        held = wanted
        alone_now, both_now = answers(held)
        assert torch.equal(alone_now, alone)
        assert torch.allclose(both_now, both, rtol=0.02, atol=0.02 * both.abs().max().item())
        for number, rank in enumerate(ranks):
            for got, expected in zip(rank.tensors(), Rank(model, held, number).tensors(), strict=True):
                assert torch.equal(rows_as_bytes(got), rows_as_bytes(expected))
    assert addresses == [[tensor.data_ptr() for tensor in rank.tensors()] for rank in ranks]


MODEL = "sums-gpt-oss-mxfp4"


def model_of(*layers: Rank) -> Any:
    """A model of vLLM's with these layers."""
    model: Any = nn.ModuleList(rank.layer for rank in layers)
    model.expert_weights = [rank.rows() for rank in layers]
    return model


def test_ranks_whose_scales_differ_do_not_exchange_experts() -> None:
    """A kernel was chosen by the range of the scales of the experts that a rank had at first."""
    held, said = [*range(8)], Ranks()
    first, second = (Rank(MODEL, held, rank) for rank in range(RANKS))
    require_alike(model_of(first), said)
    require_alike(model_of(second), said)
    plans = second.method.packed._plans
    second.method.packed._plans = PlanCache.of(
        replace(plans.problem, scales=ScaleRange(largest_exponent=30)), plans.request, plans.layout, plans.parts
    )
    said = Ranks()
    require_alike(model_of(first), said)
    with pytest.raises(PlanError, match=r"\(EPLB\) in .*expected the same plan on all ranks") as error:
        require_alike(model_of(second), said)
    assert "rank 1: " in str(error.value)
    assert "scales up to 2**30" in str(error.value)


def test_layers_that_differ_are_refused() -> None:
    """vLLM has one buffer for all of a model's layers, and would copy what of two layers it finds at the same place."""
    layers = [Rank(name, [*range(8)], 0) for name in (MODEL, MODEL, "sums-kimi-k2-int4")]
    require_alike(model_of(*layers[:2]), lambda mine: [mine])
    with pytest.raises(UnsupportedProblem, match=r"the same tensors in every layer.*in layers number 0 and 2 of them"):
        require_alike(model_of(*layers), lambda mine: [mine])


def test_a_model_without_our_layers_is_vllms() -> None:
    model: Any = nn.Module()
    model.expert_weights = [[torch.zeros(2, 3)], [torch.zeros(2, 4)]]
    require_alike(model, lambda mine: [mine])
