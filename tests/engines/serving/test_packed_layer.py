"""Packed experts as parameters of an engine's module: right results, also after a refill in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polymoe
from polymoe.checkpoint import Checkpoint
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import StackedExperts
from polymoe.engines.serving.stand_aside import LayerPlan, judge_layer
from polymoe.errors import ArgumentError, PlanError, VerificationError
from polymoe.layer.packed_layer import PackedLayer
from polymoe.problem.tensors import ExpertWeights
from support.stacked import BUNDLED, CPU, MODELS, experts_of, facts_of, local_experts

CPU_DEVICE = torch.device("cpu")


def packed(model: str, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1)) -> tuple[PackedLayer, nn.Module]:
    experts = experts_of(model, tp, ep)
    about = BUNDLED[model]
    theirs = Checkpoint.open(MODELS / model).problem(about.layer)
    facts = facts_of(
        model,
        tensors=experts.tensors,
        intermediate=experts.intermediate,
        first_expert=local_experts(about.experts, ep)[0],
        activation=theirs.activation,
        weight_on=theirs.weight_on,
        tp=tp[1],
        ep=ep[1],
    )
    plan = judge_layer(facts, CPU, EngineSettings())
    assert isinstance(plan, LayerPlan)
    layer, module = PackedLayer("layer", plan.problem, CPU), nn.Module()
    layer.pack(module, experts.weights(plan.problem.spec), CPU_DEVICE)
    return layer, module


def call(model: str, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    about, generator = BUNDLED[model], torch.Generator().manual_seed(1)
    x = torch.randn(tokens, about.hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(about.experts, generator=generator)[:2] for _ in range(tokens)]).int()
    return x, ids, torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize("model", BUNDLED)
def test_it_computes_what_load_experts_computes(model: str) -> None:
    layer, module = packed(model)
    expected = polymoe.load_experts(MODELS / model, BUNDLED[model].layer, device="cpu", check=False)(*call(model))
    assert torch.equal(layer(module, *call(model)), expected)


@pytest.mark.parametrize("model", ["sums-gpt-oss-mxfp4", "sums-qwen3-fp8", "sums-kimi-k2-int4"])
@pytest.mark.parametrize("group", ["tp", "ep"])
def test_two_ranks_add_up(model: str, group: str) -> None:
    arguments = call(model)
    ranks = [packed(model, **{group: (rank, 2)}) for rank in (0, 1)]
    total = sum(layer(module, *arguments).float() for layer, module in ranks)
    whole = polymoe.load_experts(MODELS / model, BUNDLED[model].layer, device="cpu", check=False)(*arguments).float()
    assert torch.allclose(total, whole, rtol=0.02, atol=0.02 * whole.abs().max().item())  # each is rounded to 16 bits


def test_everything_packed_is_a_parameter_of_the_module() -> None:
    layer, module = packed("sums-gpt-oss-mxfp4")
    assert {name.partition("_")[0] for name, _ in module.named_parameters()} == {"packed"}
    assert not any(p.dtype.is_floating_point and p.itemsize == 1 for p in module.parameters())
    assert layer.nbytes(module) == sum(p.numel() * p.itemsize for p in module.parameters())
    assert not list(module.buffers())


def changed(model: str, factor: float) -> tuple[StackedExperts, ExpertWeights]:
    """The same experts with other biases or scales."""
    experts = experts_of(model, (0, 1), (0, 1))
    tensors = {n: t * factor if t.dtype in (torch.bfloat16, torch.float32) else t for n, t in experts.tensors.items()}
    object.__setattr__(experts, "tensors", tensors)
    return experts, experts.weights(experts.spec(BUNDLED[model].experts))


def refill(layer: PackedLayer, module: nn.Module, weights: ExpertWeights) -> None:
    """As vLLM reloads: new parameters, which are copied over the old ones, which then take their places again."""
    old = dict(module.named_parameters())
    for name in old:
        delattr(module, name)
    layer.pack(module, weights, CPU_DEVICE)
    assert {n: (p.shape, p.dtype) for n, p in module.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in old.items()
    }
    for name, parameter in old.items():
        parameter.data.copy_(module.get_parameter(name))
        delattr(module, name)
        module.register_parameter(name, parameter)


@pytest.mark.parametrize("model", ["sums-gpt-oss-mxfp4", "sums-qwen3-fp8"])
def test_a_refill_keeps_addresses_and_gives_the_new_results(model: str) -> None:
    layer, module = packed(model)
    addresses = {n: p.data_ptr() for n, p in module.named_parameters()}
    before = layer(module, *call(model))
    for factor in (0.5, 0.25):
        refill(layer, module, changed(model, factor)[1])
        after = layer(module, *call(model))
        assert {n: p.data_ptr() for n, p in module.named_parameters()} == addresses
        fresh, other = PackedLayer("layer", layer.problem, CPU), nn.Module()
        fresh.pack(other, changed(model, factor)[1], CPU_DEVICE)
        assert torch.equal(after, fresh(other, *call(model)))
        assert not torch.equal(after, before)


@pytest.mark.slow
def test_a_compiled_call_finds_the_refilled_parameters() -> None:
    layer, module = packed("sums-qwen3-fp8")
    compiled = torch.compile(lambda *a: layer(module, *a), fullgraph=True, backend="aot_eager")
    arguments = call("sums-qwen3-fp8")
    assert torch.equal(compiled(*arguments), layer(module, *arguments))
    refill(layer, module, changed("sums-qwen3-fp8", 0.5)[1])
    assert torch.equal(compiled(*arguments), layer(module, *arguments))


def test_parameters_that_moved_are_found() -> None:
    layer, module = packed("sums-qwen3-fp8")
    expected = layer(module, *call("sums-qwen3-fp8"))
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    layer.plans.packed(layer.tensors(module)).tensors["down.codes"].view(torch.uint8).zero_()
    assert not torch.equal(layer(module, *call("sums-qwen3-fp8")), expected)


def test_scales_that_reach_further_are_refused_at_a_refill() -> None:
    layer, module = packed("sums-gpt-oss-mxfp4")
    experts, weights = changed("sums-gpt-oss-mxfp4", 1.0)
    experts.tensors["w2_weight_scale"][0, 0, 0] = 200  # 2**73
    with pytest.raises(PlanError, match="layer: new weights: expected scales of ordinary range"):
        layer.pack(module, weights, CPU_DEVICE)


@pytest.mark.parametrize("in_place", [False, True])
def test_new_weights_that_were_packed_wrongly_never_reach_the_layer(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, module = packed("sums-qwen3-fp8")
    before = layer(module, *call("sums-qwen3-fp8"))
    complete = PackedLayer._complete
    monkeypatch.setattr(PackedLayer, "_complete", lambda *args: [t.flip(0) for t in complete(*args)])
    with pytest.raises(VerificationError, match="layer, backend 'reference'"):
        layer.pack(module, changed("sums-qwen3-fp8", 4.0)[1], CPU_DEVICE, in_place=in_place)
    assert torch.equal(layer(module, *call("sums-qwen3-fp8")), before)


def test_a_call_before_the_layer_was_loaded() -> None:
    layer, _ = packed("sums-qwen3-fp8")
    with pytest.raises(PlanError, match="expected packed experts, got none"):
        PackedLayer("layer", layer.problem, CPU)(nn.Module(), *call("sums-qwen3-fp8"))


def test_x_of_another_dtype_is_refused() -> None:
    layer, module = packed("sums-qwen3-fp8")
    x, ids, weights = call("sums-qwen3-fp8")
    with pytest.raises(ArgumentError, match="x_TH"):
        layer(module, x.to(torch.float8_e4m3fn), ids, weights)
