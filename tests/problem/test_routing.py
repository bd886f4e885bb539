"""Routers: hand-worked choices, edge cases and refusals. Their agreement with Transformers has its own file."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.errors import ArgumentError
from polymoe.problem.routing import (
    HashTopK,
    Router,
    SigmoidInput,
    SigmoidTopK,
    SoftmaxTopK,
    SqrtSoftplusTopK,
    TopKSoftmax,
)


def random_logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def side_inputs(router: Router, tokens: int, experts: int, device: str = "cpu") -> dict[str, Any]:
    """What the router needs beside the logits."""
    if router.uses_correction_bias:
        return {"correction_bias_E": random_logits(1, experts, seed=9)[0].to(device)}
    if router.uses_token_table:
        table_VA = torch.arange(7 * router.top_k).view(7, router.top_k) % experts
        return {"token_ids_T": (torch.arange(tokens) % 7).to(device), "tid2eid_VA": table_VA.to(device)}
    return {}


ROUTERS = [
    TopKSoftmax(4),
    SoftmaxTopK(4, renormalize=False),
    SoftmaxTopK(4, renormalize=True),
    SigmoidTopK(4, scaling=2.5),
    SigmoidTopK(4, n_group=4, topk_group=2, renormalize=False),
    SqrtSoftplusTopK(4, scaling=1.5),
    HashTopK(4, scaling=1.5),
    SigmoidInput(4),
]
LOGITS = torch.tensor([[0.0, 2.0, -1.0, 1.0]])
NO_BIAS = torch.zeros(4)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_topk_softmax() -> None:
    ids, weights = TopKSoftmax(2)(LOGITS)
    assert ids.tolist() == [[1, 3]]
    assert weights[0].tolist() == pytest.approx([sigmoid(1), sigmoid(-1)])  # a softmax over 2 and 1


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_topk(renormalize: bool) -> None:
    ids, weights = SoftmaxTopK(2, renormalize=renormalize)(LOGITS)
    terms = [math.exp(2), math.exp(1)]
    total = sum(terms) if renormalize else sum(terms) + 1 + math.exp(-1)
    assert ids.tolist() == [[1, 3]]
    assert weights[0].tolist() == pytest.approx([t / total for t in terms])


def test_sigmoid_topk_bias_chooses_and_does_not_weigh() -> None:
    ids, weights = SigmoidTopK(2, renormalize=False, scaling=2.0)(
        LOGITS, correction_bias_E=torch.tensor([0.0, 0.0, 1.0, 0.0])
    )
    assert ids.tolist() == [[2, 1]]
    assert weights[0].tolist() == pytest.approx([2 * sigmoid(-1), 2 * sigmoid(2)])


def test_sigmoid_topk_renormalizes_before_scaling() -> None:
    _, weights = SigmoidTopK(2, scaling=2.5)(LOGITS, correction_bias_E=NO_BIAS)
    total = sigmoid(2) + sigmoid(1)
    assert weights[0].tolist() == pytest.approx([2.5 * sigmoid(2) / total, 2.5 * sigmoid(1) / total])


def test_group_score_is_the_sum_of_the_two_best() -> None:
    # The best expert of all is in the first group, but two good ones beat it.
    logits = torch.tensor([[3.0, -3.0, -3.0, 1.0, 1.5, -3.0]])
    ids, _ = SigmoidTopK(2, n_group=2, topk_group=1)(logits, correction_bias_E=torch.zeros(6))
    assert ids.tolist() == [[4, 3]]


def test_group_score_counts_the_bias() -> None:
    logits = torch.tensor([[3.0, 3.0, 0.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.6, 0.6])
    ids, weights = SigmoidTopK(2, n_group=2, topk_group=1)(logits, correction_bias_E=bias)
    assert sorted(ids[0].tolist()) == [2, 3]
    assert weights[0].tolist() == pytest.approx([0.5, 0.5])


def test_masked_groups_lose_even_to_negative_scores() -> None:
    bias = torch.tensor([-1.0, -5.0, -1.1, -1.2, -9.0, -9.0, -9.0, -9.0])
    ids, _ = SigmoidTopK(4, n_group=2, topk_group=1)(torch.zeros(1, 8), correction_bias_E=bias)
    assert ids.tolist() == [[0, 2, 3, 1]]


def test_keeping_all_groups_is_the_same_as_none() -> None:
    logits, bias = random_logits(32, 16), random_logits(1, 16, seed=1)[0]
    plain = SigmoidTopK(4)(logits, correction_bias_E=bias)
    grouped = SigmoidTopK(4, n_group=4, topk_group=4)(logits, correction_bias_E=bias)
    assert all(torch.equal(a, b) for a, b in zip(plain, grouped, strict=True))


def test_sqrt_softplus_golden_values() -> None:
    router = SqrtSoftplusTopK(3, renormalize=False)
    ids, weights = router(torch.tensor([[-2.0, 0.0, 2.0]]), correction_bias_E=torch.zeros(3))
    assert ids.tolist() == [[2, 1, 0]]
    assert weights[0].tolist() == pytest.approx([1.45840, 0.83255, 0.35627], abs=5e-6)


def test_sqrt_softplus_far_out_and_tiny() -> None:
    _, weights = SqrtSoftplusTopK(1, renormalize=False)(torch.tensor([[1e4, 0.0]]), correction_bias_E=torch.zeros(2))
    assert weights.item() == pytest.approx(100.0)
    _, weights = SqrtSoftplusTopK(2)(torch.full((1, 4), -1e4), correction_bias_E=NO_BIAS)
    assert weights.tolist() == [[0.0, 0.0]]  # not 0 / 0


def test_hash_takes_the_table_in_its_order() -> None:
    table = torch.tensor([[0, 1], [3, 2], [2, 2]], dtype=torch.int32)
    ids, weights = HashTopK(2, renormalize=False, scaling=1.5)(
        torch.tensor([[-2.0, 0.0, 2.0, 0.0]] * 3), token_ids_T=torch.tensor([1, 2, 1]), tid2eid_VA=table
    )
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[3, 2], [2, 2], [3, 2]]
    assert weights[0].tolist() == pytest.approx([1.5 * 0.83255, 1.5 * 1.45840], abs=2e-5)


def test_sigmoid_input() -> None:
    ids, weights = SigmoidInput()(LOGITS)
    assert (ids.tolist(), weights.item()) == ([[1]], pytest.approx(sigmoid(2)))
    assert [type(r).__name__ for r in ROUTERS if r.weight_on == "input"] == ["SigmoidInput"]


def test_sigmoid_input_chooses_by_logit_where_sigmoids_are_equal() -> None:
    ids, weights = SigmoidInput()(torch.tensor([[30.0, 40.0, 35.0]]))
    assert (ids.item(), weights.item()) == (1, 1.0)


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shapes_and_dtypes(router: Router, tokens: int, dtype: torch.dtype) -> None:
    logits = random_logits(tokens, 16).to(dtype)
    ids, weights = router(logits, **side_inputs(router, tokens, 16))
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert ids.shape == weights.shape == (tokens, 4)
    exact = router(logits.float(), **side_inputs(router, tokens, 16))
    assert torch.equal(weights, exact.topk_weights_TA)


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_reads_no_values_of_a_device_tensor(router: Router) -> None:
    ids, weights = router(torch.empty(3, 16, device="meta"), **side_inputs(router, 3, 16, "meta"))
    assert ids.shape == weights.shape == (3, 4)
    assert ids.is_meta


@pytest.mark.parametrize(
    "router", [TopKSoftmax(6), SoftmaxTopK(6, renormalize=True), SigmoidTopK(6), SqrtSoftplusTopK(6)]
)
def test_all_experts_chosen(router: Router) -> None:
    ids, weights = router(random_logits(8, 6), **side_inputs(router, 8, 6))
    assert ids.sort(-1).values.tolist() == [list(range(6))] * 8
    torch.testing.assert_close(weights.sum(-1), torch.ones(8))


def test_many_of_very_many() -> None:
    logits, bias = random_logits(64, 512), random_logits(1, 512, seed=1)[0]
    ids, weights = SigmoidTopK(22, scaling=5.0)(logits, correction_bias_E=bias)
    expected = (logits.double().sigmoid() + bias.double()).argsort(-1, descending=True)[:, :22]
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights.sum(-1), torch.full((64,), 5.0))


def test_bias_in_16_bits_changes_the_experts() -> None:
    # A bias of GLM-5.2's range. Training balances the load with it, so it offsets what each expert scores on average;
    # bfloat16 has steps of 1/32 between 4 and 8.
    generator = torch.Generator().manual_seed(3)
    bias = torch.empty(256).uniform_(6.817, 7.063, generator=generator)
    scores = 7.3 - bias + 0.02 * torch.randn(512, 256, generator=generator)
    router, logits = SigmoidTopK(8, scaling=2.5), scores.logit()
    rounded = bias.bfloat16()
    assert len(rounded.unique()) <= 9
    exact = router(logits, correction_bias_E=bias).topk_ids_TA.sort(-1).values
    lossy = router(logits, correction_bias_E=rounded.float()).topk_ids_TA.sort(-1).values
    assert (exact != lossy).any(-1).float().mean() > 0.95


@pytest.mark.parametrize("router", [SigmoidTopK(2), SqrtSoftplusTopK(2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_refuses_a_bias_that_is_not_float32(router: Router, dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=rf"float32 .* got {str(dtype)[6:]} .*\n  hint: .*GLM-5.2: 6.817 to 7.063"):
        router(LOGITS, correction_bias_E=NO_BIAS.to(dtype))


def test_token_ids_may_be_given_to_any_router() -> None:
    for router in ROUTERS:
        inputs = side_inputs(router, 4, 16)
        ids = router(random_logits(4, 16), **{"token_ids_T": torch.arange(4), **inputs}).topk_ids_TA
        assert torch.equal(ids, router(random_logits(4, 16), **inputs).topk_ids_TA)


TABLE = torch.tensor([[0, 1], [2, 3]])
TOKEN = torch.tensor([1])


@pytest.mark.parametrize(
    ("router", "logits", "inputs", "message"),
    [
        (TopKSoftmax(2), torch.zeros(4), {}, r"logits_TE: expected floats of shape \[T, E\] on cpu, got float32"),
        (TopKSoftmax(2), torch.zeros(1, 4, dtype=torch.int64), {}, "logits_TE: expected floats .* got int64"),
        (TopKSoftmax(5), LOGITS, {}, r"expected at least top_k=5 experts, got .*\[1, 4\]"),
        (TopKSoftmax(2), LOGITS, {"correction_bias_E": NO_BIAS}, "bias_E: expected None.*\n  hint: this router"),
        (HashTopK(2), LOGITS, {"correction_bias_E": NO_BIAS}, "HashTopK correction_bias_E: expected None"),
        (SigmoidTopK(2), LOGITS, {}, "correction_bias_E: expected a tensor, got None\n  hint: .* pass zeros"),
        (SqrtSoftplusTopK(2), LOGITS, {}, "SqrtSoftplusTopK correction_bias_E: expected a tensor"),
        (SigmoidTopK(2), LOGITS, {"correction_bias_E": torch.zeros(1)}, r"float32 of shape \[4\] .* shape \[1\]"),
        (SigmoidTopK(2), LOGITS, {"correction_bias_E": torch.zeros(4, device="meta")}, "on cpu, got .* on meta"),
        (SigmoidTopK(2), LOGITS, {"correction_bias_E": NO_BIAS, "tid2eid_VA": TABLE}, "tid2eid_VA: expected None"),
        (SigmoidTopK(2, n_group=3), LOGITS, {"correction_bias_E": NO_BIAS}, "3 equal groups"),
        (SigmoidTopK(1, n_group=4), LOGITS, {"correction_bias_E": NO_BIAS}, "groups of at least 2 experts"),
        (SigmoidTopK(3, n_group=2), LOGITS, {"correction_bias_E": NO_BIAS}, "top_k=3 experts in topk_group=1"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN}, "tid2eid_VA: expected a tensor, got None"),
        (HashTopK(2), LOGITS, {"tid2eid_VA": TABLE}, "token_ids_T: expected a tensor, got None"),
        (HashTopK(3), LOGITS, {"token_ids_T": TOKEN, "tid2eid_VA": TABLE}, r"shape \[V, 3\] .* shape \[2, 2\]"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN, "tid2eid_VA": TABLE.float()}, "expected integers .* float32"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN[None], "tid2eid_VA": TABLE}, r"shape \[1\] .* shape \[1, 1\]"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN.bool(), "tid2eid_VA": TABLE}, "expected integers .* bool"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN + 1, "tid2eid_VA": TABLE}, "ids from 0 to 1, got 2 to 2"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN - 2, "tid2eid_VA": TABLE}, "ids from 0 to 1, got -1 to -1"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN, "tid2eid_VA": TABLE + 1}, "tid2eid_VA: expected ids from 0 to 3"),
        (HashTopK(2), LOGITS, {"token_ids_T": TOKEN, "tid2eid_VA": TABLE - 3}, "got -1 to 0"),
    ],
)
def test_refuses_inputs(router: Router, logits: Tensor, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        router(logits, **inputs)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TopKSoftmax, {"top_k": 0}, "TopKSoftmax.top_k: expected a positive integer, got 0"),
        (SigmoidInput, {"top_k": "1"}, "got '1'"),
        (HashTopK, {"top_k": True}, "got True"),
        (SoftmaxTopK, {"top_k": 2, "renormalize": None}, "SoftmaxTopK.renormalize: expected true or false, got None"),
        (SigmoidTopK, {"top_k": 2, "n_group": 0}, "SigmoidTopK.n_group"),
        (SigmoidTopK, {"top_k": 2, "n_group": 2, "topk_group": 3}, "topk_group: expected at most n_group=2, got 3"),
        (SigmoidTopK, {"top_k": 2, "scaling": 0.0}, "SigmoidTopK.scaling: expected a finite number above 0"),
        (SqrtSoftplusTopK, {"top_k": 2, "scaling": math.nan}, "scaling"),
        (HashTopK, {"top_k": 2, "scaling": math.inf}, "scaling"),
    ],
)
def test_refuses_constants(kind: type[Router], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kind(**options)


def test_values_compare_by_constants() -> None:
    assert len({*ROUTERS, SigmoidTopK(4, scaling=2.5)}) == len(ROUTERS)
    assert SqrtSoftplusTopK(4) != HashTopK(4)
