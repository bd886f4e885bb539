"""Stacked tensors of vLLM's and SGLang's methods, read expert by expert, hold what load_experts reads from files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from polymoe.checkpoint import Checkpoint
from polymoe.engines.serving.sources import VLLM, StackedExperts, StackedSource
from polymoe.errors import CheckpointError, FormatError
from polymoe.layouts import LAYOUTS, staging
from polymoe.layouts.pack_check import pack_checked
from polymoe.problem.scale_range import measure_scales
from polymoe.problem.tensors import Expert
from support.stacked import BUNDLED, MODELS, experts_of, sglang_experts_of, stacked

RANKS = [((0, 1), (0, 1)), ((0, 2), (0, 1)), ((1, 2), (0, 1)), ((0, 1), (0, 2)), ((0, 1), (1, 2))]
REFINED = ("sums-deepseek-v3-fp8", "sums-qwen3-fp8")


def parts(expert: Expert) -> dict[str, torch.Tensor]:
    found = {f"{p}.{n}": t for p, q in expert.projections.items() for n, t in q.parts().items()}
    return {**found, **expert.vectors}


def assert_same(ours: Expert, theirs: Expert) -> None:
    """Equal bits; scales that the engine widens to float32 have equal values."""
    wanted, got = parts(theirs), parts(ours)
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        other = got[name]
        if tensor.dtype != other.dtype:
            assert (tensor.dtype, other.dtype) == (torch.bfloat16, torch.float32)
            tensor = tensor.float()
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(tensor.contiguous().view(kind), other.contiguous().view(kind)), name


@pytest.mark.parametrize(
    ("model", "tp", "ep"),
    [(model, *rank) for model, about in BUNDLED.items() for rank in RANKS if rank[0][1] in about.tp],
    ids=str,
)
def test_a_ranks_experts_are_those_of_load_experts(model: str, tp: tuple[int, int], ep: tuple[int, int]) -> None:
    about = BUNDLED[model]
    static = about.method.endswith(("Nvfp4MoEMethod", "NvFp4FusedMoE"))
    ours = experts_of(model, tp, ep, static=static)
    theirs = Checkpoint.open(MODELS / model).weights(about.layer, tp=tp, ep=ep)
    spec = ours.spec(about.experts, theirs.spec.first_expert)
    assert replace(spec, gate=None, up=theirs.spec.up, down=theirs.spec.down) == replace(theirs.spec, gate=None)
    weights = ours.weights(spec)
    if model in REFINED and tp[1] > 1:  # blocks of 64 in both directions, where polymoe divides only those that it must
        assert spec.down.name == "fp8_block64"
        for mine, wanted in zip(weights.dequantize(), theirs.dequantize(), strict=True):
            assert torch.equal(mine, wanted)
        return
    assert [e.name for e in spec.encodings.values()] == [e.name for e in theirs.spec.encodings.values()]
    for e in range(spec.local_experts):
        assert_same(weights.expert(e), theirs.expert(e))


@pytest.mark.parametrize(
    ("model", "tp", "ep"),
    # SGLang refuses to split blocks.
    [(m, *r) for m, about in BUNDLED.items() for r in RANKS if r[0][1] in ((1,) if m in REFINED else about.tp)],
    ids=str,
)
def test_sglangs_tensors_hold_the_same_experts(model: str, tp: tuple[int, int], ep: tuple[int, int]) -> None:
    static = BUNDLED[model].method.endswith(("Nvfp4MoEMethod", "NvFp4FusedMoE"))
    ours, theirs = (read(model, tp, ep, static=static) for read in (sglang_experts_of, experts_of))
    spec = ours.spec(ours.count)
    assert spec == theirs.spec(theirs.count)
    for e in range(ours.count):
        assert_same(ours.weights(spec).expert(e), theirs.weights(spec).expert(e))


@pytest.mark.parametrize("rank", range(3))
def test_padding_of_gpt_oss_is_zeros(rank: int) -> None:
    """192 columns are 6 groups: of 4 ranks three get 2 and the last none, so 3 ranks of 2 suffice."""
    model, about = "sums-gpt-oss-mxfp4", BUNDLED["sums-gpt-oss-mxfp4"]
    tensors = stacked(model, (rank, 3))
    tail = {n: torch.nn.functional.pad(t, _padding(n)) for n, t in tensors.items()}
    ours = experts_of(model, (rank, 3), (0, 1), tensors=tail, intermediate=96)
    theirs = Checkpoint.open(MODELS / model).weights(about.layer, tp=(rank, 3))
    gate_up, down = ours.weights(ours.spec(8)).dequantize()
    gate_up_theirs, down_theirs = theirs.dequantize()
    assert torch.equal(gate_up.view(8, 2, 96, -1)[:, :, :64], gate_up_theirs.view(8, 2, 64, -1))
    assert torch.equal(down[..., :64], down_theirs)
    assert not gate_up.view(8, 2, 96, -1)[:, :, 64:].any()
    assert not down[..., 64:].any()


def _padding(name: str) -> tuple[int, ...]:
    """32 more columns of F, interleaved rows of w13."""
    return {
        "w13_bias": (0, 64), "w2_weight": (0, 16), "w2_weight_scale": (0, 1), "w2_bias": (0, 0)
    }.get(name, (0, 0, 0, 64))  # fmt: skip


def test_the_order_of_w13_belongs_to_the_method() -> None:
    """The same tensors read in the other order are other experts: nothing but the row says which it is."""
    right = experts_of("sums-gpt-oss-mxfp4", (0, 1), (0, 1))
    wrong = replace(right, source=replace(right.source, interleaved=False))
    read = [x.weights(x.spec(8)).expert(0) for x in (right, wrong)]
    assert not torch.equal(read[0].up.codes, read[1].up.codes)
    both = zip(*(torch.cat([x.gate.codes, x.up.codes]).sort(0).values for x in read if x.gate), strict=True)
    assert all(torch.equal(*pair) for pair in itertools.islice(both, 8))


def test_compressed_tensors_may_be_stored_transposed() -> None:
    """vLLM up to 0.26 stores INT4 of compressed-tensors with K first."""
    straight = experts_of("sums-kimi-k2-int4", (0, 1), (0, 1))
    turned = {
        n: t if n.endswith("weight_shape") else t.transpose(1, 2).contiguous() for n, t in straight.tensors.items()
    }
    other = replace(straight, tensors=turned, k_first=True)
    assert other.spec(8) == straight.spec(8)
    for e in range(8):
        assert_same(other.weights(other.spec(8)).expert(e), straight.weights(straight.spec(8)).expert(e))


def test_meta_tensors_say_what_the_experts_will_be() -> None:
    for model, about in BUNDLED.items():
        real = experts_of(model, (0, 1), (0, 1))
        meta = replace(real, tensors={n: t.to("meta") for n, t in real.tensors.items()})
        assert meta.spec(about.experts) == real.spec(about.experts)


def _without(name: str) -> StackedExperts:
    ours = experts_of("sums-glm-4-nvfp4", (0, 1), (0, 1))
    return replace(ours, tensors={n: t for n, t in ours.tensors.items() if n != name})


def test_a_tensor_that_the_method_lacks_is_refused() -> None:
    with pytest.raises(FormatError, match="weight_packed, weight_scale, weight_global_scale, got"):
        _without("w2_weight_global_scale")


def test_a_tensor_of_another_shape_is_refused_by_its_name() -> None:
    ours = experts_of("sums-qwen3-fp8", (0, 1), (0, 1))
    odd = replace(ours, tensors={**ours.tensors, "w2_weight_scale_inv": torch.ones(5, 3, 1)})
    with pytest.raises(FormatError, match=r"layer\.w2_weight_scale_inv: expected shape"):
        odd.spec(5)


def test_a_missing_bias_and_scales_that_are_not_finite_are_refused() -> None:
    ours = experts_of("sums-gpt-oss-mxfp4", (0, 1), (0, 1))
    spec = ours.spec(8)
    none = replace(ours, tensors={n: t for n, t in ours.tensors.items() if n != "w2_bias"})
    with pytest.raises(CheckpointError, match=r"layer\.w2_bias"):
        none.weights(spec).expert(0)
    damaged = {**ours.tensors, "w13_weight_scale": ours.tensors["w13_weight_scale"].clone()}
    damaged["w13_weight_scale"][3, 5, 2] = 0xFF  # row 5 is the third one of up
    with pytest.raises(FormatError, match=r"layer up\[3\] scales: .*at \[2, 2\]"):
        replace(ours, tensors=damaged).weights(spec).expert(3)


def test_zero_points_that_must_be_8() -> None:
    ours = experts_of("sums-mixtral-awq", (0, 1), (0, 1), symmetric=True)
    assert [str(e) for e in ours.spec(8).encodings.values()] == ["int4_g128"] * 3
    with pytest.raises(FormatError, match=r"layer\.w13_qzeros\[0\]: expected 8 everywhere"):
        ours.weights(ours.spec(8)).expert(0)


def test_every_row_names_dialects_that_exist_once() -> None:
    assert list(VLLM) == sorted(VLLM)
    assert all(isinstance(row, StackedSource) and row.dialects for row in VLLM.values())


COMPUTED = ("sums-glm-4-nvfp4", "sums-mixtral-awq")  # reciprocals of scales, and columns of words
CPU = torch.device("cpu")


@pytest.mark.parametrize("make", [experts_of, sglang_experts_of])
@pytest.mark.parametrize("model", BUNDLED)
def test_stacks_are_views_of_what_is_read_one_by_one(model: str, make: Callable[..., StackedExperts]) -> None:
    experts = make(model, (0, 1), (0, 1))
    weights = experts.weights(experts.spec(experts.count))
    turned = experts.k_first and not experts.dialect.k_first
    assert (weights.stacks is None) == (model in COMPUTED or turned)
    for e in range(experts.count if weights.stacks else 0):
        assert weights.stacks is not None
        wanted = parts(weights.peek(e))
        assert wanted.keys() == weights.stacks.keys()
        for name, part in wanted.items():
            assert weights.stacks[name][e].data_ptr() == part.data_ptr()
            assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (weights.stacks[name][e], part)))


@pytest.mark.parametrize(
    ("model", "layout"), [("sums-gpt-oss-mxfp4", "w4a16_fragments"), ("sums-kimi-k2-int4", "w4a16_fragments")]
)
def test_stacks_are_packed_as_experts_one_by_one(model: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of three, as on GPUs; what is wrong is named all the same."""
    experts = experts_of(model, (0, 1), (0, 1))
    weights = experts.weights(experts.spec(experts.count))
    alone = pack_checked(LAYOUTS[layout], replace(weights, stacks=None), CPU, "layer 3")
    monkeypatch.setattr(staging, "_IN_BLOCKS", ("cpu",))
    monkeypatch.setattr(staging, "_BLOCK_BYTES", 3 * weights.spec.expert_bytes)
    packed = pack_checked(LAYOUTS[layout], replace(weights, read=None), CPU, "layer 3")
    for name, tensor in alone.tensors.items():
        assert torch.equal(packed.tensors[name], tensor), name
    bias = experts.tensors.get("w2_bias", experts.tensors["w2_weight_scale"])
    bias[5].view(-1)[7] = torch.nan
    with pytest.raises(FormatError, match=r"w2_bias\[5\]" if experts.bias else r"layer down\[5\]"):
        pack_checked(LAYOUTS[layout], weights, CPU, "layer 3")


def test_the_range_of_stacked_scales() -> None:
    experts = experts_of("sums-gpt-oss-mxfp4", (0, 1), (0, 1))
    weights = experts.weights(experts.spec(experts.count))
    for rows, byte in ((slice(0, 1), 160), (slice(9, 10), 90)):  # beyond what kernels decode, and far apart in a row
        scales = experts.tensors["w13_weight_scale"]
        assert measure_scales(weights) is None
        before = scales[2, rows, :1].clone()
        scales[2, rows, :1] = byte
        found = measure_scales(weights)
        assert found is not None
        assert found == measure_scales(replace(weights, stacks=None))
        scales[2, rows, :1] = before
    scales[1, 0, 0] = 255
    with pytest.raises(FormatError, match="experts, expert 1 gate"):
        measure_scales(weights)
