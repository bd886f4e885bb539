"""polymoe's experts in vLLM's modular kernel, with what vLLM prepares and finalizes without any other package."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="scripts/test --engines has it")

from vllm.model_executor.layers.fused_moe import all2all_utils  # pyright: ignore
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # pyright: ignore
from vllm.model_executor.layers.fused_moe.config import (  # pyright: ignore
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat  # pyright: ignore
from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep  # pyright: ignore
from vllm.model_executor.layers.quantization.utils import quant_utils  # pyright: ignore
from vllm.v1.worker.workspace import init_workspace_manager  # pyright: ignore

import polymoe
from polymoe.checkpoint import Checkpoint
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerPlan, judge_layer
from polymoe.engines.serving.take_over import take_over
from polymoe.engines.vllm import modular
from polymoe.engines.vllm.method import PackedMethod
from polymoe.errors import UnsupportedProblem
from polymoe.machine import Machine
from support.stacked import BUNDLED, CPU, MODELS, experts_of, facts_of, local_experts

MODEL = "sums-qwen3-fp8"
CPU_DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def workspace() -> None:
    init_workspace_manager(CPU_DEVICE)


class Method:
    """vLLM's, as far as it matters here."""

    def __init__(self) -> None:
        self.moe_kernel = None


def config(model: str, ranks: int, **changes: Any) -> FusedMoEConfig:
    about = BUNDLED[model]
    alone = vars(FusedMoEParallelConfig.make_no_parallel())
    split = {"dp_size": ranks, "ep_size": ranks, "use_ep": ranks > 1, **changes}
    return FusedMoEConfig(
        num_experts=about.experts,
        experts_per_token=2,
        hidden_dim=about.hidden,
        intermediate_size=about.intermediate,
        num_local_experts=about.experts // ranks,
        num_logical_experts=about.experts,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Default,
        moe_parallel_config=FusedMoEParallelConfig(**{**alone, **split}),
        in_dtype=torch.bfloat16,
    )


def packed(model: str, rank: int = 0, ranks: int = 1, activations: str = "auto", **split: Any) -> tuple[Any, Any]:
    """A method that was taken over, and its layer, whose experts are packed."""
    experts = experts_of(model, (0, 1), (rank, ranks))
    theirs = Checkpoint.open(MODELS / model).problem(BUNDLED[model].layer)
    facts = facts_of(
        model,
        tensors=experts.tensors,
        first_expert=local_experts(BUNDLED[model].experts, (rank, ranks))[0],
        activation=theirs.activation,
        weight_on=theirs.weight_on,
        top_k=theirs.top_k,
        ep=ranks,
    )
    plan = judge_layer(facts, CPU, EngineSettings(activations=activations))
    assert isinstance(plan, LayerPlan)
    method = take_over(
        Method(), PackedMethod, plan, CPU, dummy=False, first_of_its_kind=lambda _: False, on_packed=lambda *_: None
    )
    layer = nn.Module()
    layer.moe_config = config(model, ranks, **split)  # type: ignore[assignment]
    layer.expert_map = None  # type: ignore[assignment]
    method.packed.pack(layer, experts.weights(plan.problem.spec), CPU_DEVICE, check=False)
    return method, layer


def call(model: str, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    about, generator = BUNDLED[model], torch.Generator().manual_seed(tokens)
    top_k = Checkpoint.open(MODELS / model).moe.top_k
    x = torch.randn(tokens, about.hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(about.experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
    return x, torch.rand(tokens, top_k, generator=generator), ids


def expected(model: str, x: Tensor, weights: Tensor, ids: Tensor, activations: str = "auto") -> Tensor:
    layer = BUNDLED[model].layer
    experts = polymoe.load_experts(MODELS / model, layer, device="cpu", activations=activations, check=False)
    return experts(x, ids, weights)


@pytest.mark.parametrize("model", [MODEL, "sums-gpt-oss-mxfp4", "sums-llama-4-fp8"])
def test_a_kernel_computes_what_the_method_computes(model: str) -> None:
    """Llama-4's experts weight their input, which must happen once."""
    method, layer = packed(model)
    arguments = call(model)
    direct = method.apply(layer, *arguments)
    assert torch.equal(direct, expected(model, *arguments))
    assert method.topk_indices_dtype is None
    method.moe_kernel = modular.modular_kernel(method, layer)
    assert type(method.moe_kernel.prepare_finalize).__name__ == "MoEPrepareAndFinalizeNoDPEPModular"
    assert torch.equal(method.apply(layer, *arguments), direct)
    assert method.topk_indices_dtype is None


class Group:
    """Ranks, one after the other: all tokens are gathered, and what each computed for them is kept."""

    def __init__(self, calls: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.calls = calls
        self.partial: list[Tensor] = []
        self.device_communicator = SimpleNamespace(all2all_manager=SimpleNamespace(world_size=len(calls)))

    def dispatch(self, x: Tensor, weights: Tensor, ids: Tensor, **_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.cat(parts) for parts in zip(*self.calls, strict=True))

    def allocate_combine_input(self, *_: Any, **__: Any) -> None:
        """None of the group's own."""

    def combine_into_output(self, partial: Tensor, output: Tensor, **_: Any) -> None:
        rank = len(self.partial)
        self.partial.append(partial.clone())
        first = sum(len(x) for x, _, _ in self.calls[:rank])
        output.copy_(partial[first : first + len(output)])


def test_ranks_of_data_parallelism_gather_tokens_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five experts on two ranks, of which one has three tokens and the other seven."""
    calls = [call(MODEL, 3), call(MODEL, 7)]
    group = Group(calls)
    for module in (naive_dp_ep, all2all_utils):
        monkeypatch.setattr(module, "get_ep_group", lambda: group)
    outputs = []
    for rank in (0, 1):
        method, layer = packed(MODEL, rank, 2)
        method.moe_kernel = modular.modular_kernel(method, layer)
        assert type(method.moe_kernel.prepare_finalize).__name__ == "MoEPrepareAndFinalizeNaiveDPEPModular"
        outputs.append(method.apply(layer, *calls[rank]))
    assert [output.shape for output in outputs] == [x.shape for x, _, _ in calls]
    total = torch.stack(group.partial).float().sum(0)
    whole = expected(MODEL, *group.dispatch(*calls[0])).float()
    assert torch.allclose(total, whole, rtol=0.02, atol=0.02 * whole.abs().max().item())
    assert not torch.equal(*group.partial)


class DeepEPBuffer:
    """DeepEP's high-throughput buffer of one of two ranks that have the same tokens: it checks every tensor that it
    gets, dispatches rows in another order, and keeps what is to be combined."""

    capture = staticmethod(lambda: None)

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.combined: list[tuple[Tensor, Tensor]] = []

    def get_dispatch_layout(self, *, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        assert (topk_idx.dtype, topk_idx.dim(), num_experts) == (torch.int64, 2, BUNDLED[MODEL].experts)
        return (None,) * 4 + (SimpleNamespace(event=None),)

    def dispatch(self, *, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, **_: Any) -> tuple[Any, ...]:
        assert isinstance(x, Tensor), "16 bits come without scales"
        assert (x.dtype, x.shape[1], x.is_contiguous()) == (torch.bfloat16, BUNDLED[MODEL].hidden, True)
        assert (topk_weights.dtype, topk_weights.shape) == (torch.float32, topk_idx.shape)
        local = topk_idx - self.first
        local = torch.where((local >= 0) & (local < self.count), local, -1)
        rows = (local >= 0).any(1).nonzero().flatten().flip(0)
        counts = [int((local == e).sum()) for e in range(self.count)]
        return x[rows], local[rows], topk_weights[rows], counts, rows, SimpleNamespace(event=None)

    def combine(self, *, x: Tensor, handle: Tensor, topk_weights: None, **_: Any) -> tuple[Any, ...]:
        assert (x.dtype, x.shape) == (torch.bfloat16, (len(handle), BUNDLED[MODEL].hidden))
        assert x.is_contiguous()
        self.combined.append((handle, x.clone()))
        return torch.zeros(TOKENS, x.shape[1], dtype=x.dtype), None, SimpleNamespace(event=None)


TOKENS = 7


@pytest.mark.parametrize("form", ["16 bits", "blocks of FP8"])
def test_vllms_deepep_steps_get_and_give_what_deepep_takes(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Its own code, around a stand-in for DeepEP: also where vLLM would dispatch FP8, x is sent in 16 bits."""
    buffer = SimpleNamespace(get_dispatch_config=lambda _: None, get_combine_config=lambda _: None)
    stand_in = {"Buffer": buffer, "Config": object, "EventOverlap": object, "__name__": "deep_ep"}
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(**stand_in))
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import (  # pyright: ignore
        DeepEPHTPrepareAndFinalize,
    )

    x, weights, ids = call(MODEL, TOKENS)
    total = torch.zeros(x.shape)
    for rank, (first, count) in enumerate(((0, 3), (3, 2))):
        method, layer = packed(MODEL, rank, 2)
        buffers = DeepEPBuffer(first, count)
        steps = DeepEPHTPrepareAndFinalize(buffers, num_dispatchers=2, dp_size=2, rank_expert_offset=first)
        quantization = method.get_fused_moe_quant_config(layer)
        if form != "16 bits":
            quantization = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128])
        experts = modular.ModularExperts(method, layer, layer.moe_config, quantization)
        method.moe_kernel = modular.FusedMoEKernel(steps, experts)
        assert method.topk_indices_dtype == torch.int64
        output = method.apply(layer, x, weights, ids.to(method.topk_indices_dtype))
        assert (output.shape, output.dtype) == (x.shape, x.dtype)
        ((rows, partial),) = buffers.combined
        total[rows] += partial.float()
    whole = expected(MODEL, x, weights, ids).float()
    assert torch.allclose(total, whole, rtol=0.02, atol=0.02 * whole.abs().max().item())


class LowLatencyBuffer:
    """DeepEP's low-latency buffer of one of two ranks that have the same tokens: it checks every tensor that it gets,
    and gives each expert a batch whose rows after the last token hold NaN."""

    def __init__(self, model: str, first: int, count: int, fp8: bool) -> None:
        self.about, self.first, self.count, self.fp8 = BUNDLED[model], first, count, fp8

    def low_latency_dispatch(
        self, x: Tensor, ids: Tensor, most: int, experts: int, *, use_fp8: bool, use_ue8m0: bool, **_: Any
    ) -> tuple[Any, ...]:
        assert (x.dtype, x.shape, x.is_contiguous()) == (torch.bfloat16, (TOKENS, self.about.hidden), True)
        assert (ids.dtype, ids.dim(), experts) == (torch.int64, 2, self.about.experts)
        assert (use_fp8, use_ue8m0) == (self.fp8, False)
        batches = torch.full((self.count, RANKS * most, x.shape[1]), float("nan"), dtype=x.dtype)
        counts = torch.zeros(self.count, dtype=torch.int32)
        self.row: dict[tuple[int, int], int] = {}
        for token, expert in [(t, e - self.first) for t in range(TOKENS) for e in ids[t].tolist()]:
            if 0 <= expert < self.count:
                self.row[token, expert] = row = int(counts[expert])
                batches[expert, row] = x[token]
                counts[expert] += 1
        hook = lambda: None  # noqa: E731
        if not use_fp8:
            return batches, counts, "handle", None, hook
        groups = batches.float().unflatten(2, (-1, 128))
        scales = groups.abs().amax(3) / 448
        codes = (groups / scales[..., None]).flatten(2).to(torch.float8_e4m3fn)
        # As DeepEP stores them: row after row for each group.
        return (codes, scales.transpose(1, 2).contiguous().transpose(1, 2)), counts, "handle", None, hook

    def low_latency_combine(
        self, x: Tensor, ids: Tensor, weights: Tensor, handle: str, *, out: Tensor, **_: Any
    ) -> tuple[None, None, Any]:
        assert (x.dtype, x.shape[0], x.shape[2], x.is_contiguous()) == (
            torch.bfloat16, self.count, self.about.hidden, True,
        )  # fmt: skip
        assert (weights.dtype, weights.shape, handle) == (torch.float32, ids.shape, "handle")
        total = torch.zeros(out.shape)
        for token, slot in [(t, a) for t in range(TOKENS) for a in range(ids.shape[1])]:
            expert = int(ids[token, slot]) - self.first
            if 0 <= expert < self.count:
                total[token] += weights[token, slot] * x[expert, self.row[token, expert]].float()
        out.copy_(total)
        return None, None, lambda: None


RANKS = 2


@pytest.mark.parametrize(
    ("model", "activations"),
    [(MODEL, "16bit"), (MODEL, "fp8_group128"), ("sums-gpt-oss-mxfp4", "16bit"), ("sums-llama-4-fp8", "16bit")],
)
def test_batches_of_rows_from_deepeps_low_latency_steps(
    monkeypatch: pytest.MonkeyPatch, model: str, activations: str
) -> None:
    """vLLM's own code around a stand-in for DeepEP. x is sent in FP8 where the kernels take it so."""
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=object, __name__="deep_ep"))
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import (  # pyright: ignore
        DeepEPLLPrepareAndFinalize,
    )

    monkeypatch.setattr(DeepEPLLPrepareAndFinalize, "SUPPORTED_HIDDEN_SIZES", [BUNDLED[model].hidden])
    x, weights, ids = call(model, TOKENS)
    total, fp8, half = torch.zeros(x.shape), activations != "16bit", BUNDLED[model].experts // 2
    for rank, (first, count) in enumerate(((0, BUNDLED[model].experts - half), (BUNDLED[model].experts - half, half))):
        method, layer = packed(model, rank, RANKS, activations, all2all_backend="deepep_low_latency")
        layer.apply_router_weight_on_input = method.plan.problem.weight_on == "input"
        buffer = LowLatencyBuffer(model, first, count, fp8)

        def steps(moe: Any, quantization: Any, buffer: Any = buffer, **_: Any) -> Any:
            sends_fp8 = quantization.quant_dtype == torch.float8_e4m3fn and quantization.block_shape == [128, 128]
            return DeepEPLLPrepareAndFinalize(buffer, 16, RANKS, use_fp8_dispatch=sends_fp8)

        monkeypatch.setattr(modular, "maybe_make_prepare_finalize", steps)
        method.moe_kernel = modular.modular_kernel(method, layer)
        output = method.apply(layer, x, weights, ids.to(method.topk_indices_dtype))
        assert (output.shape, output.dtype) == (x.shape, x.dtype)
        total += output.float()
    whole = expected(model, x, weights, ids, activations).float()
    assert torch.allclose(total, whole, rtol=0.03, atol=0.03 * whole.abs().max().item())


def test_batches_of_experts_that_are_placed_in_turns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepEP's ids are places, and vLLM's tables of them are for its own experts."""
    method, layer = packed(MODEL)
    method.plan = replace(method.plan, mapped=True)
    batched = SimpleNamespace(activation_format=FusedMoEActivationFormat.BatchedExperts)
    monkeypatch.setattr(modular, "maybe_make_prepare_finalize", lambda *_, **__: batched)
    with pytest.raises(UnsupportedProblem, match="experts placed linearly"):
        modular.modular_kernel(method, layer)


def test_a_rank_that_no_token_reaches() -> None:
    """DeepEP may give a rank no rows."""
    method, layer = packed(MODEL)
    experts = modular.ModularExperts(method, layer, layer.moe_config, method.get_fused_moe_quant_config(layer))
    x, weights, ids = (part[:0] for part in call(MODEL))
    output = torch.empty_like(x)
    experts.apply(output, x, topk_weights=weights, topk_ids=ids.long())
    assert output.shape == (0, BUNDLED[MODEL].hidden)


def test_an_all_to_all_backend_without_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method, layer = packed(MODEL)
    monkeypatch.setattr(modular, "maybe_make_prepare_finalize", lambda *_, **__: None)
    with pytest.raises(UnsupportedProblem, match="an all-to-all backend with prepare and finalize steps"):
        modular.modular_kernel(method, layer)


ON_H100 = Machine.of("h100")


@pytest.fixture(params=["cpu", "h100"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What vLLM runs on, as the classes among which it chooses see it."""
    if request.param == "h100":
        monkeypatch.setattr(modular, "machine_of", lambda _: ON_H100)
    modular._runs.cache_clear()
    return request.param


SCHEMES = {
    None: True,
    "kFp8StaticTensorSym": True,
    "kFp8StaticChannelSym": True,
    "kFp8StaticTokenSym": True,
    "kFp8Static128BlockSym": True,
    "kMxfp8Static": True,
    "kMxfp4Static": True,
    "kNvfp4Static": True,
    "kInt4Static": True,
    "kInt4Static32": True,
    "kInt4StaticAsym": True,
    "kMxfp6E3M2Static": False,
    "kInt8StaticChannelSym": False,
    "kInt8StaticTensorAsym": False,
}


@pytest.mark.parametrize(("name", "taken"), SCHEMES.items(), ids=str)
def test_schemes_that_it_supports_are_those_that_a_backend_runs(machine: str, name: str | None, taken: bool) -> None:
    key = None if name is None else getattr(quant_utils, name)
    assert modular.ModularExperts._supports_quant_scheme(key, None) == taken


def test_it_says_what_no_backend_runs(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def supported(key: Any = None, moe: Any = None, form: Any = FusedMoEActivationFormat.Standard) -> str | None:
        experts = modular.ModularExperts
        ok, reason = experts.is_supported_config(experts, moe or config(MODEL, 1), key, None, form)
        assert ok == (reason is None)
        return reason

    assert supported() is None
    assert supported(quant_utils.kFp8Static128BlockSym) is None
    assert "QuantKey(i8" in str(supported(quant_utils.kInt8StaticChannelSym))
    assert supported(form=FusedMoEActivationFormat.BatchedExperts) is not None
    assert supported(moe=config(MODEL, 2)) is None
    balanced = config(MODEL, 2, enable_eplb=True)
    assert supported(moe=balanced) is None
    exchanged = {"use_ep": True, "all2all_backend": "deepep_low_latency"}
    assert "deepep_low_latency" in str(supported(moe=config(MODEL, 2, **exchanged)))
    batches = modular.BatchedExperts
    form = FusedMoEActivationFormat.BatchedExperts
    assert batches.is_supported_config(batches, config(MODEL, 2, **exchanged), None, None, form) == (True, None)
    assert not batches.is_supported_config(batches, config(MODEL, 2), None, None, form)[0]
    other = config(MODEL, 1)
    other.activation = MoEActivation.SWIGLUSTEP
    assert "activation" in str(supported(moe=other))
    other.activation = MoEActivation.RELU2_NO_MUL
    assert supported(moe=other) is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert (supported() is None) == (machine == "h100")


def test_a_machine_without_a_backend_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modular, "BACKENDS", {})
    modular._runs.cache_clear()
    assert not modular.ModularExperts._supports_current_device()
    modular._runs.cache_clear()
