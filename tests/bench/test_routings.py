"""Routings: uniform, Zipf, given; the floor of what they hit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from polymoe.backends.cost import cost
from polymoe.bench.routings import floor_us, parse_routing
from polymoe.errors import ArgumentError
from polymoe.machine import DEVICES
from polymoe.problem.routing import Routing
from support.tiny import CPU, TINY

PROBLEM = TINY.changed(experts=64).problem()


def counts(text: str, tokens: int = 4000, index: int = 0) -> torch.Tensor:
    distribution, problem = parse_routing(text, PROBLEM)
    return distribution.draw(tokens, problem, CPU, index=index).topk_ids_TA.flatten().bincount(minlength=64)


@pytest.mark.parametrize("text", ["uniform", "zipf", "zipf:2"])
def test_a_token_goes_to_different_experts_with_weights_that_sum_to_1(text: str) -> None:
    ids, weights = parse_routing(text, PROBLEM)[0].draw(100, PROBLEM, CPU, index=0)
    assert ids.shape == weights.shape == (100, 2)
    assert (ids[:, 0] != ids[:, 1]).all()
    assert 0 <= int(ids.min()) <= int(ids.max()) < 64
    torch.testing.assert_close(weights.sum(1), torch.ones(100))


def test_routings_differ_and_repeat() -> None:
    distribution, _ = parse_routing("uniform", PROBLEM)
    a, b, again = (distribution.draw(50, PROBLEM, CPU, index=index) for index in (0, 1, 0))
    assert not torch.equal(a.topk_ids_TA, b.topk_ids_TA)
    assert torch.equal(a.topk_ids_TA, again.topk_ids_TA)


def test_how_often_experts_are_drawn() -> None:
    assert counts("uniform").float().std() < 0.15 * counts("uniform").float().mean()
    top = counts("zipf:1").sort(descending=True).values.float()
    # The first pick goes to rank 1 with p = 1 / (1 + 1/2 + ... + 1/64) = 0.211, the second adds to it.
    assert 0.211 * 4000 < top[0] < 2 * 0.25 * 4000
    assert top[0] / top[31] > 10
    assert counts("zipf:2").max() > counts("zipf:1").max()
    assert counts("zipf:1", index=0).argmax() != counts("zipf:1", index=1).argmax()


def test_given_ids_in_order_and_over_again(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([[0, 1, 2], [3, 4, 5], [6, 7, 8]]))
    distribution, problem = parse_routing(str(path), PROBLEM)
    assert (distribution.name, problem.top_k) == ("file:ids.json", 3)
    assert distribution.draw(2, problem, CPU, index=0).topk_ids_TA.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert distribution.draw(2, problem, CPU, index=1).topk_ids_TA.tolist() == [[6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom", "uniform, zipf, zipf:S or a JSON file"),
        ("zipf:0", "above 0"),
        ("zipf:steep", "above 0"),
        ("zipf:inf", "above 0"),
    ],
)
def test_words_that_mean_nothing(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_routing(text, PROBLEM)


@pytest.mark.parametrize(
    ("content", "where"),
    [("{", "ids.json: "), ("[]", "ids.json: "), ("[[0], [1, 2]]", "row 1"), ("[[64]]", "row 0"), ("[[true]]", "row 0")],
)
def test_files_that_are_no_routing(tmp_path: Path, content: str, where: str) -> None:
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(ArgumentError, match=where):
        parse_routing(str(tmp_path / "ids.json"), PROBLEM)


def test_the_floor_counts_the_experts_that_are_hit() -> None:
    one = Routing(torch.tensor([[3, 4]] * 10), torch.ones(10, 2))
    four = Routing(torch.tensor([[3, 4], [5, 6]] * 5), torch.ones(10, 2))
    h200 = DEVICES["h200"]
    io = cost(PROBLEM, h200, 10).activation_bytes
    for routings, hit in (([one], 2), ([four], 4), ([one, four], 3)):
        expected = 1e6 * (hit * PROBLEM.spec.expert_bytes + io) / h200.bandwidth
        assert floor_us(PROBLEM, h200, routings) == pytest.approx(expected)
    large = TINY.changed(hidden=4096, intermediate=2048).problem()
    many = Routing(one.topk_ids_TA.repeat(10**4, 1), one.topk_weights_TA)
    assert floor_us(large, h200, [many]) == pytest.approx(cost(large, h200, 10**5).compute_us)
