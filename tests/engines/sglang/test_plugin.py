"""The plug-in in a small stand-in for SGLang: layers compute what load_experts does, and SGLang's traps stay shut."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import polymoe
from polymoe.engines.sglang import register
from polymoe.engines.sglang.facts import _activation
from polymoe.errors import CheckpointError, FormatError, PlanError, UnsupportedProblem
from polymoe.formats import FORMATS
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU
from support import fake_sglang
from support.fake_sglang import (
    BlockInt8MoEMethod,
    Fp8MoEMethod,
    Mxfp4MoEMethod,
    ServerArgs,
    StandardDispatchOutput,
    StandardTopKOutput,
    TopKOutputFormat,
)
from support.stacked import BUNDLED, MODELS, stacked

MODEL = "sums-qwen3-fp8"
ABOUT = BUNDLED[MODEL]
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"

Make = Callable[..., Any]


class Config:
    """A quantization config, with the methods that its layers got."""

    def __init__(self, kind: type[Any] = Fp8MoEMethod) -> None:
        self.kind = kind

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return self.kind()


@pytest.fixture
def server() -> ServerArgs:
    return ServerArgs()


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("POLYMOE", "POLYMOE_LAYERS", "POLYMOE_BACKEND", "POLYMOE_ACTIVATIONS", "POLYMOE_ROLE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def make(server: ServerArgs, variables: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a layer in an SGLang with the plug-in, as ``server`` and the environment are then."""
    with fake_sglang.installed(server) as apply:
        registered = False

        def make(layer_id: int = 1, kind: type[Any] = Fp8MoEMethod, **given: Any) -> Any:
            nonlocal registered
            if not registered:
                register()
            registered = True
            prefix = given.pop("prefix", f"model.layers.{layer_id}.mlp.experts")
            sizes = (ABOUT.experts, ABOUT.hidden, ABOUT.intermediate, layer_id, given.pop("top_k", 2))
            return apply()(*sizes, Config(kind), prefix, **given)

        yield make


@functools.cache
def tensors() -> dict[str, Tensor]:
    return stacked(MODEL)


def load(layer: Any, without: tuple[str, str, int] = ("", "", 0)) -> None:
    """Load the checkpoint's tensors, one shard of one expert at a time, and process the layer."""
    load_parts(layer, tensors(), without)
    layer.quant_method.process_weights_after_loading(layer)


def load_parts(layer: Any, tensors: dict[str, Tensor], without: tuple[str, str, int] = ("", "", 0)) -> None:
    for name, tensor in tensors.items():
        parameter = dict(layer.named_parameters())[name]
        shards = ("w1", "w3") if name.startswith("w13") else ("w2",)
        for expert in range(ABOUT.experts):
            for shard, part in zip(shards, tensor[expert].chunk(len(shards)), strict=True):
                if (name, shard, expert) != without:
                    parameter.weight_loader(parameter, part, f"experts.{name}", shard_id=shard, expert_id=expert)


def call() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(ABOUT.experts, generator=generator)[:2] for _ in range(5)]).int()
    return torch.randn(5, ABOUT.hidden, generator=generator).bfloat16(), ids, torch.rand(5, 2, generator=generator)


def output(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids))
    return layer.quant_method.apply(layer, dispatched).hidden_states


def expected(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    path: Path = MODELS / MODEL
    return polymoe.load_experts(path, ABOUT.layer, device="cpu", check=False)(x, ids, weights)


def test_a_layer_computes_what_load_experts_computes(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Although SGLang's method asks for up before gate, and its backend for transposed and exchanged tensors."""
    caplog.set_level(logging.INFO)
    layer = make()
    assert (type(layer.quant_method).__name__, isinstance(layer.quant_method, Fp8MoEMethod)) == ("Fp8MoEMethod", True)
    assert {p.device.type for p in layer.parameters()} == {"cpu"}
    load(layer)
    assert torch.equal(output(layer, *call()), expected(*call()))
    assert layer.runner is None
    assert not layer.dispatcher.skip_local_expert_mapping
    assert not layer.supports_deferred_finalize
    (record,) = [record for record in caplog.records if record.name == "sglang.polymoe"]
    assert record.levelname == "INFO"
    assert "runs model.layers.1.mlp.experts, and all layers like it: fp8_block128" in record.getMessage()
    assert record.getMessage().endswith("SGLang's own choice: Fp8MoEMethod on auto")


def test_a_layer_that_does_not_know_its_experts_of_a_token(make: Make, server: ServerArgs) -> None:
    """SGLang's Llama-4 tells only the router."""
    server.experts_per_token = 2
    layer = make(top_k=None)
    load(layer)
    assert torch.equal(output(layer, *call()), expected(*call()))


def test_a_layer_whose_experts_of_a_token_nothing_says(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert type(make(top_k=None).quant_method) is Fp8MoEMethod
    assert "experts of a token: expects their number" in caplog.text


def test_ids_of_other_ranks_contribute_nothing(make: Make) -> None:
    layer = make()
    load(layer)
    x, ids, weights = call()
    kept = torch.where(ids == 2, -1, ids)
    wanted = expected(x, ids, torch.where(ids == 2, 0.0, weights))
    assert torch.equal(output(layer, x, kept, weights), wanted)


def test_ranks_of_expert_parallelism_add_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks of one expert each; SGLang's dispatcher maps ids to places on the rank."""
    x, ids, weights = call()
    parts = []
    for rank in range(5):
        monkeypatch.setattr(fake_sglang.FusedMoE, "ranks", (0, 1, rank, 5))
        layer = make(rank)
        load(layer)
        parts.append(output(layer, x, torch.where(ids == rank, 0, -1).int(), weights).float())
    assert torch.allclose(torch.stack(parts).sum(0), expected(x, ids, weights).float(), atol=2e-2, rtol=2e-2)
    with pytest.raises(CheckpointError, match=r"w2_weight: expected all experts on this rank.*got 0 of 1 parts"):
        load(make(5), without=("w2_weight", "w2", 4))


def test_a_rank_that_plans_otherwise_is_refused(server: ServerArgs, variables: pytest.MonkeyPatch) -> None:
    """The user of the second rank leaves the layer to SGLang."""
    said: list[bytes] = []

    def group(mine: bytes) -> list[bytes]:
        said.append(mine)
        return said

    variables.setattr(fake_sglang.FusedMoE, "ranks", (0, 1, 0, 5))
    for layers in ("1", "0"):
        variables.setenv("POLYMOE_LAYERS", layers)
        with fake_sglang.installed(server, group=group) as apply:
            register()
            sizes, name = (ABOUT.experts, ABOUT.hidden, ABOUT.intermediate, 1, 2), "model.layers.1.mlp.experts"
            if layers == "1":
                apply()(*sizes, Config(Fp8MoEMethod), name)
                continue
            with pytest.raises(PlanError, match=r"(?s)rank 0: polymoe runs them.*rank 1: polymoe does not run them"):
                apply()(*sizes, Config(Fp8MoEMethod), name)


@pytest.mark.parametrize(
    ("cuda", "in_topk", "factor", "scale"),
    [(True, False, 2.5, 2.5), (True, True, 2.5, 1.0), (False, False, 2.5, 1.0), (True, False, None, 1.0)],
)
def test_the_routed_scaling_factor_is_applied_once(
    make: Make, cuda: bool, in_topk: bool, factor: float | None, scale: float
) -> None:
    """By the layer on a GPU, unless it is in the routing weights; elsewhere by SGLang's models."""
    make()
    from polymoe.engines.sglang.method import _routed_scale

    layer = SimpleNamespace(
        should_fuse_routed_scaling_factor_in_topk=in_topk,
        moe_runner_config=SimpleNamespace(routed_scaling_factor=factor),
    )
    assert _routed_scale(layer, SimpleNamespace(is_cuda=cuda)) == scale  # type: ignore[arg-type]


@pytest.mark.parametrize("on_input", [False, True])
def test_the_output_is_scaled(make: Make, monkeypatch: pytest.MonkeyPatch, on_input: bool) -> None:
    layer = make(apply_router_weight_on_input=on_input)
    load(layer)
    plain = output(layer, *call())
    from polymoe.engines.sglang import method

    monkeypatch.setattr(method, "_routed_scale", lambda *_: 4.0)
    assert torch.equal(output(layer, *call()), plain * 4)


def test_x_that_is_quantized_and_routing_without_ids_are_refused(make: Make) -> None:
    layer = make()
    load(layer)
    x, ids, weights = call()
    for dispatched in (
        StandardDispatchOutput(x.to(torch.float8_e4m3fn), torch.ones(5, 2), StandardTopKOutput(weights, ids)),
        StandardDispatchOutput(x, None, SimpleNamespace(routing_data=None)),
    ):
        with pytest.raises(UnsupportedProblem, match="expected x in 16 bits, with ids and weights of experts"):
            layer.quant_method.apply(layer, dispatched)


def test_what_was_not_loaded_is_named(make: Make) -> None:
    with pytest.raises(CheckpointError, match=r"w13_weight_scale_inv: expected all experts.*got 9 of 10 parts"):
        load(make(), without=("w13_weight_scale_inv", "w3", 3))


BATCH, IDLE = (SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda idle=idle: idle)) for idle in (False, True))


def runner_of(model: Any = None) -> Any:
    """What runs batches."""
    runner = sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner()
    if model is not None:
        runner.model = model
    return runner


def packed_addresses(layer: Any) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in layer.named_parameters() if name.startswith("packed_")}


def test_an_updated_layer_has_the_new_weights_at_the_old_addresses(make: Make) -> None:
    """Part by part, as from tensors; then from disk, where SGLang processes the layers at the end."""
    layer = make()
    load(layer)
    first, addresses = output(layer, *call()), packed_addresses(layer)
    assert addresses
    assert all(p.numel() == 0 for name, p in layer.named_parameters() if not name.startswith("packed_"))
    rows = {name: t.flip(1) for name, t in tensors().items() if name == "w2_weight_scale_inv"}
    rows["w2_weight"] = tensors()["w2_weight"].view(torch.uint8).flip(1).view(torch.float8_e4m3fn)
    flipped = {**tensors(), **rows}
    load_parts(layer, flipped)
    second = output(layer, *call())
    assert not torch.equal(second, first)
    assert torch.equal(second.flip(1), first)  # rows of the down projection are columns of the output
    layer.quant_method.restore_weights_before_loading(layer)
    load(layer)
    assert torch.equal(output(layer, *call()), first)
    assert packed_addresses(layer) == addresses
    assert all(p.numel() == 0 for name, p in layer.named_parameters() if not name.startswith("packed_"))


def test_no_batch_runs_on_half_updated_weights(make: Make) -> None:
    layer = make()
    runner = runner_of()
    load(layer)
    first = output(layer, *call())
    assert runner.forward(BATCH) == "ran"
    with pytest.raises(CheckpointError, match=r"w13_weight_scale_inv: expected all experts.*got 9 of 10 parts"):
        load(layer, without=("w13_weight_scale_inv", "w3", 3))
    with pytest.raises(UnsupportedProblem, match=r"model.layers.1.mlp.experts: .* of w13_weight_scale_inv"):
        runner.forward(BATCH)
    assert runner.forward(IDLE) == "ran"  # what a rank without requests does while weights arrive
    assert torch.equal(output(layer, *call()), first)  # the layer itself is whole
    parameter = dict(layer.named_parameters())["w13_weight_scale_inv"]
    part = tensors()["w13_weight_scale_inv"][3].chunk(2)[1]
    parameter.weight_loader(parameter, part, "experts.w13_weight_scale_inv", shard_id="w3", expert_id=3)
    assert runner.forward(BATCH) == "ran"
    assert torch.equal(output(layer, *call()), first)
    with pytest.raises(CheckpointError):
        load(layer, without=("w2_weight", "w2", 4))
    load(layer)  # all of it once more
    assert runner.forward(BATCH) == "ran"


def test_an_update_that_cannot_be_packed_leaves_the_layer_and_must_come_again(make: Make) -> None:
    layer = make()
    runner = runner_of()
    load(layer)
    first = output(layer, *call())
    scales = tensors()["w2_weight_scale_inv"].clone()
    scales[2] = float("nan")
    with pytest.raises(FormatError, match="down"):
        load_parts(layer, {**tensors(), "w2_weight_scale_inv": scales})
    assert torch.equal(output(layer, *call()), first)
    with pytest.raises(UnsupportedProblem, match="after an error, start SGLang again"):
        runner.forward(BATCH)
    load_parts(layer, {"w2_weight": tensors()["w2_weight"]})
    with pytest.raises(UnsupportedProblem, match="none, or not all parts, of w13_weight"):
        runner.forward(BATCH)
    load_parts(layer, {name: t for name, t in tensors().items() if name != "w2_weight"})
    assert runner.forward(BATCH) == "ran"


def plain_weights(seed: int) -> dict[tuple[int, str], Tensor]:
    """Matrices in BF16 by expert and shard."""
    generator = torch.Generator().manual_seed(seed)
    rows = (ABOUT.intermediate, ABOUT.hidden)
    shapes = {"w1": rows, "w2": rows[::-1], "w3": rows}
    keys = [(e, shard) for e in range(ABOUT.experts) for shard in shapes]
    return {(e, shard): 0.1 * torch.randn(shapes[shard], generator=generator).bfloat16() for e, shard in keys}


def send(layer: Any, weights: dict[tuple[int, str], Tensor]) -> None:
    for (expert, shard), tensor in weights.items():
        parameter = dict(layer.named_parameters())["w2_weight" if shard == "w2" else "w13_weight"]
        parameter.weight_loader(parameter, tensor, "experts.weight", shard_id=shard, expert_id=expert)


def test_new_weights_in_16_bits_are_quantized_in_place(make: Make) -> None:
    layer = make()
    load(layer)
    addresses = packed_addresses(layer)
    weights = plain_weights(5)
    stacks = {shard: torch.stack([weights[e, shard] for e in range(ABOUT.experts)]) for shard in ("w1", "w2", "w3")}
    fresh = polymoe.FusedExperts.from_weights(
        polymoe.ExpertWeights.quantize(torch.cat([stacks["w1"], stacks["w3"]], 1), stacks["w2"], "fp8_block128"),
        SwiGLU(),
        top_k=2,
        device="cpu",
    )
    for _ in range(2):
        send(layer, weights)
        assert torch.equal(output(layer, *call()), fresh(*call()))
        load(layer)  # as the checkpoint stores them
        assert torch.equal(output(layer, *call()), expected(*call()))
    assert packed_addresses(layer) == addresses


def test_new_weights_with_biases_are_quantized_or_loaded_as_they_come(make: Make) -> None:
    """gpt-oss', of all experts at once. Biases come first, so that the matrices tell which weights they belong to."""
    layer = make(kind=Mxfp4MoEMethod, with_bias=True, gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    e, h, f = ABOUT.experts, ABOUT.hidden, ABOUT.intermediate
    gate_up, down, gate_up_bias, down_bias = (
        0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i, shape in enumerate(((e, 2 * f, h), (e, h, f), (e, 2 * f), (e, h)))
    )
    biases = {"w13_weight_bias": gate_up_bias, "w2_weight_bias": down_bias}
    plain = {"w13_weight": gate_up.mT.reshape(e, 2 * f, h), "w2_weight": down.mT.reshape(e, 2 * h, f // 2)}
    codes = {}
    for name, matrices in (("w13_weight", gate_up), ("w2_weight", down)):
        found = [FORMATS["mxfp4"].quantize(matrix) for matrix in matrices]
        codes[name] = torch.stack([q.codes for q in found])
        codes[f"{name}_scale"] = torch.stack([q.scales.view(torch.uint8) for q in found if q.scales is not None])

    def hand_over(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            parameter = dict(layer.named_parameters())[name]
            parameter.weight_loader(parameter, tensor, f"experts.{name}", shard_id=None, expert_id=None)

    hand_over({**biases, **codes})
    layer.quant_method.process_weights_after_loading(layer)
    first, addresses = output(layer, *call()), packed_addresses(layer)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in biases.items()}
    for weights in (plain, codes):
        hand_over({**zeros, **weights})
        second = output(layer, *call())
        assert not torch.equal(second, first)
        hand_over({**biases, **weights})
        assert torch.equal(output(layer, *call()), first)
    assert packed_addresses(layer) == addresses
    hand_over(biases)
    with pytest.raises(CheckpointError, match="expected every tensor of its experts, got none for gate of expert 0"):
        layer.quant_method.process_weights_after_loading(layer)
    hand_over({**biases, **plain})
    assert torch.equal(output(layer, *call()), first)


def test_no_batch_runs_on_half_of_the_new_weights(make: Make) -> None:
    """Of two layers; the other one was not sent at all."""
    layers = torch.nn.ModuleList([make(1), make(2)])
    for layer in layers:
        load(layer)
    runner = runner_of(layers)
    weights = plain_weights(6)
    send(layers[0], {(0, "w1"): weights[0, "w1"]})
    with pytest.raises(CheckpointError, match="expected each tensor once in an update, got a second one"):
        send(layers[0], {(0, "w1"): weights[0, "w1"]})
    with pytest.raises(UnsupportedProblem, match=r"layers.1.mlp.experts: .*got none, or an update that failed"):
        runner.forward(BATCH)
    send(layers[0], dict(list(weights.items())[:-1]))
    with pytest.raises(UnsupportedProblem, match=r"layers.1.mlp.experts: .*got none for up of expert 4"):
        runner.forward(BATCH)
    send(layers[0], dict(list(weights.items())[-1:]))
    with pytest.raises(UnsupportedProblem, match=r"layers.2.mlp.experts: expected new weights of all layers"):
        runner.forward(BATCH)
    broken = weights[1, "w2"].clone()
    broken[3, 4] = float("nan")
    with pytest.raises(FormatError, match="w2_weight w2 of expert 1: expected finite numbers"):
        send(layers[1], {**weights, (1, "w2"): broken})
    send(layers[1], weights)
    assert runner.forward(BATCH) == "ran"
    send(layers[0], weights)
    with pytest.raises(FormatError):
        send(layers[1], {**weights, (1, "w2"): broken})
    for layer in layers:  # all of it once more
        send(layer, weights)
    assert runner.forward(BATCH) == "ran"
    for layer in layers:
        send(layer, weights)
    send(layers[1], weights)  # of the next update, before a batch has run
    with pytest.raises(UnsupportedProblem, match=r"layers.1.mlp.experts: .*got none, or an update that failed"):
        runner.forward(BATCH)


def test_a_model_with_layers_in_16_bits_gets_new_weights(make: Make) -> None:
    """They are loaded as the checkpoint stores them, whatever the trainer sends."""
    layers = torch.nn.ModuleList([make(1), make(2)])
    for layer in layers:
        load(layer)
    runner = runner_of(layers)
    for seed in (5, 6):
        load(layers[0])
        send(layers[1], plain_weights(seed))
        assert runner.forward(BATCH) == "ran"
    load(layers[0])
    assert runner.forward(BATCH) == "ran"  # an update of one layer, as the checkpoint stores it
    send(layers[1], plain_weights(7))
    load(layers[0])
    assert runner.forward(BATCH) == "ran"


def test_a_draft_model_waits_for_its_own_new_weights(make: Make) -> None:
    target, drafter = torch.nn.ModuleList([make(1)]), torch.nn.ModuleList([make(2)])
    for model in (target, drafter):
        load(model[0])
    runners = [runner_of(model) for model in (target, drafter)]
    weights = plain_weights(6)
    send(drafter[0], dict(list(weights.items())[:-1]))
    send(target[0], weights)
    assert runners[0].forward(BATCH) == "ran"
    with pytest.raises(UnsupportedProblem, match=r"layers.2.mlp.experts: .*got none for up of expert 4"):
        runners[1].forward(BATCH)
    send(drafter[0], dict(list(weights.items())[-1:]))
    assert runners[1].forward(BATCH) == "ran"


def test_tensors_without_loaders_are_not_copied(make: Make) -> None:
    from polymoe.engines.sglang.plugin import NO_DIRECT

    make()
    updater = sys.modules[UPDATER].WeightUpdater()
    assert updater.update_weights_from_tensor([], "direct") == (False, NO_DIRECT)
    assert updater.update_weights_from_tensor([]) == (True, "Success")


def test_a_server_that_started_with_dummy_weights_is_updated(server: ServerArgs, make: Make) -> None:
    server.load_format = "dummy"
    layer = make()
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.isfinite(output(layer, *call())).all()
    load_parts(layer, tensors())
    assert torch.equal(output(layer, *call()), expected(*call()))


def test_dummy_weights_are_made_on_the_device_of_the_model(
    server: ServerArgs, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's loader of dummy weights leaves them on the CPU, where polymoe created them."""
    server.load_format = "dummy"
    layer = make()
    method, found = layer.quant_method, set()
    method.device = torch.device("meta")  # stands for a GPU

    def pack(*_: Any) -> None:
        found.update(layer._parameters[name].device.type for name in method.created)

    monkeypatch.setattr(method, "pack", pack)
    method.process_weights_after_loading(layer)
    assert found == {"meta"}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"cpu_offload_gb": 1}, {}, "offloading of weights to the CPU"),
    ({"dwdp_size": 2}, {}, "DWDP"),
    ({"enable_eplb": True}, {}, "load balancing of experts (EPLB)"),
    ({"enable_lora": True}, {}, "LoRA"),
    ({"lora_paths": ["a"]}, {}, "LoRA"),
    ({"enable_paged_experts": True}, {}, "--enable-paged-experts"),
    ({"enable_single_batch_overlap": True}, {}, "--enable-single-batch-overlap"),
    ({"ep_num_redundant_experts": 1}, {}, "redundant experts (EPLB)"),
    ({"init_expert_location": "file"}, {}, "--init-expert-location"),
    ({"kt_weight_path": "a"}, {}, "experts on the CPU (KTransformers)"),
    ({"offload_group_size": 2}, {}, "offloading of weights to the CPU"),
    ({"torchao_config": "int4wo-128"}, {}, "--torchao-config"),
    ({"weight_cache_mode": "read"}, {}, "--weight-cache-mode"),
    ({"moe_a2a_backend": "deepep"}, {}, "--moe-a2a-backend: expects none, got deepep"),
    ({"load_format": "sharded_state"}, {}, "--load-format"),
    ({"architectures": ["InklingForConditionalGeneration"]}, {}, "model"),
    ({"enable_deterministic_inference": True}, {}, "reference: batch-invariant results: not supported"),
    ({}, {"no_combine": True}, "output"),
    ({}, {"activation": "situ"}, "activation"),
    ({}, {"gemm1_clamp_limit": 7.0}, "activation: expects silu, clamped before it, or gelu, or relu2"),
    ({}, {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "rows of w13"),
    ({}, {"kind": BlockInt8MoEMethod}, "method"),
]


@pytest.mark.parametrize(("asked", "given", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_reasons_why_sglang_keeps_a_layer(
    server: ServerArgs, make: Make, caplog: pytest.LogCaptureFixture, asked: Any, given: Any, reason: str
) -> None:
    for name, value in asked.items():
        setattr(server, name, value)
    layer = make(**given)
    assert type(layer.quant_method) in (Fp8MoEMethod, BlockInt8MoEMethod)
    assert (layer.runner, layer.dispatcher.skip_local_expert_mapping) == ("SGLang's", True)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().partition(" to SGLang: ")[2].startswith(reason)


def test_a_server_without_one_of_the_arguments_keeps_its_layers(
    server: ServerArgs, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(ServerArgs, "enable_symm_mem")
    assert type(make().quant_method) is Fp8MoEMethod
    assert "server argument enable_symm_mem: expects one of this SGLang" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, SwiGLU()),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, SwiGLU(1.702, 1.0, 7.0)),
        ({"gemm1_alpha": 1.0, "gemm1_beta": 0.5}, SwiGLU(1.0, 0.5)),
        ({"swiglu_limit": 10}, SwiGLU(limit=10.0)),
        ({"gemm1_clamp_limit": 7.0}, None),
        ({"activation": "gelu"}, GeGLU()),
        ({"activation": "gelu", "gemm1_alpha": 1.0}, None),
        ({"activation": "relu2", "is_gated": False}, ReLU2()),
        ({"activation": "silu", "is_gated": False}, None),
        ({"activation": "silu_rounded"}, None),
    ],
    ids=str,
)
def test_activations(config: dict[str, Any], found: Activation | None) -> None:
    plain = {"gemm1_alpha": None, "gemm1_clamp_limit": None, "swiglu_limit": None, "activation": "silu"}
    assert _activation(SimpleNamespace(**{**plain, "is_gated": True, **config})) == found


@pytest.mark.parametrize("declared", [False, True])
def test_a_backend_is_the_users_unless_sglang_chose_it(
    server: ServerArgs, make: Make, caplog: pytest.LogCaptureFixture, declared: bool
) -> None:
    caplog.set_level(logging.INFO)
    server.moe_runner_backend = "triton_kernel"
    if declared:
        server._resolved_overrides = [("_gpt_oss_overrides", {"moe_runner_backend": "triton_kernel"})]
    layer = make()
    assert (type(layer.quant_method) is Fp8MoEMethod) != declared
    if not declared:
        (record,) = caplog.records
        assert record.levelname == "INFO"  # no warning: the user asked for it
        assert record.getMessage().endswith("--moe-runner-backend: expects auto, got triton_kernel")


def test_routing_gives_ids_to_layers_that_polymoe_runs(make: Make, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("POLYMOE_LAYERS", "1")
    make(1)
    make(2)
    topk = sys.modules["sglang.srt.layers.moe.topk"].TopK
    found = [topk(number).forward_cuda(torch.ones(1), torch.ones(1)) for number in (1, 2)]
    assert found == [TopKOutputFormat.STANDARD, TopKOutputFormat.TRITON_KERNEL]


@pytest.mark.parametrize("backend", ["auto", "triton_kernel"])
def test_layers_of_one_number_are_run_by_one_side(server: ServerArgs, make: Make, backend: str) -> None:
    """Where the backend, which SGLang chose, wants another routing than polymoe, and a TopK has only its number."""
    server.moe_runner_backend = backend
    server._resolved_overrides = [("_overrides", {"moe_runner_backend": backend})]
    make(1)
    if backend == "auto":
        assert type(make(1, BlockInt8MoEMethod).quant_method) is BlockInt8MoEMethod
        return
    with pytest.raises(UnsupportedProblem, match="all layers with the number 1 run by one side"):
        make(1, BlockInt8MoEMethod)


def test_a_layer_without_a_name_has_its_number(make: Make, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("POLYMOE_LAYERS", "!3")
    assert type(make(3, prefix="").quant_method) is Fp8MoEMethod
    assert type(make(4, prefix="").quant_method) is not Fp8MoEMethod


def test_off_registers_nothing(make: Make, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("POLYMOE", "0")
    assert type(make().quant_method) is Fp8MoEMethod


def test_errors_of_the_plug_in_are_raised_at_the_layer(server: ServerArgs, variables: pytest.MonkeyPatch) -> None:
    """SGLang only logs what a plug-in raises."""
    variables.setenv("POLYMOE", "perhaps")
    with fake_sglang.installed(server) as apply:
        with pytest.raises(polymoe.errors.ArgumentError):
            register()
        layer = apply()
        with pytest.raises(polymoe.errors.ArgumentError, match="POLYMOE"):
            layer(4, 256, 128, 0, 2, Config())


@pytest.mark.parametrize("require", [False, True])
def test_an_sglang_that_lacks_a_name_keeps_all_layers(
    server: ServerArgs, variables: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, require: bool
) -> None:
    said = "SGLang 0.5.17 lacks sglang.srt.layers.moe.utils.get_moe_a2a_backend"
    with fake_sglang.installed(server, lacking="get_moe_a2a_backend") as apply:
        if require:
            variables.setenv("POLYMOE", "require")
            with pytest.raises(UnsupportedProblem, match=said):
                register()
            with pytest.raises(UnsupportedProblem, match=said):
                apply()(4, 256, 128, 0, 2, Config())
            return
        register()
        layer = apply()(4, 256, 128, 0, 2, Config())
        assert type(layer.quant_method) is Fp8MoEMethod
        assert caplog.records[0].getMessage().endswith(f"stands aside for all layers: {said}")


@pytest.mark.parametrize(
    ("mode", "users", "role"),
    [
        ("null", None, "mixed"),
        ("prefill", None, "prefill"),
        ("decode", None, "decode"),
        ("decode", "prefill", "prefill"),
    ],
)
def test_workers_of_a_disaggregated_deployment_have_a_role(
    server: ServerArgs, make: Make, variables: pytest.MonkeyPatch, mode: str, users: str | None, role: str
) -> None:
    """Unless the user names one."""
    server.disaggregation_mode = mode
    if users:
        variables.setenv("POLYMOE_ROLE", users)
    assert make().quant_method.plan.selection.role == role
