"""Configurations that tuning tries: few, near the heuristic, and all able to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polymoe.backends.config import Config
from polymoe.backends.triton import Tile, TritonConfig
from polymoe.backends.triton.config import MAX_SPLIT_K
from polymoe.backends.triton.tiles import PLANES, heuristic, tuning_configs
from polymoe.bench.cases import CASES
from polymoe.errors import PlanError
from polymoe.machine import DEVICES, Machine
from polymoe.problem import Problem

GPUS = list({(d.sm, d.shared_memory_bytes): name for name, d in DEVICES.items() if d.kind == "cuda"}.values())
"""One of each kind."""


def of(gpu: str) -> Machine:
    return Machine(DEVICES[gpu], {"triton": "3.6.0"})


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("case", CASES)
def test_tuning_configs_fit_the_gpu(case: str, gpu: str) -> None:
    problem, limit = CASES[case].problem(), DEVICES[gpu].shared_memory_bytes
    spec = problem.spec
    for tokens in (1, 64, 1024, 8192):
        found = tuning_configs(problem, of(gpu), tokens)
        assert found[0] == heuristic(problem, of(gpu), tokens)
        assert 10 <= len(found) == len(set(found)) <= 48
        for config in found:
            for tile, encoding, matrices in ((config.up, spec.up, 2 if spec.gated else 1), (config.down, spec.down, 1)):
                step = matrices * tile.block_n * tile.block_k * encoding.bits // 8 + tile.block_k * config.block_m * 2
                assert tile.num_stages * step <= limit
                assert tile.block_k >= 16 * PLANES[encoding.element]
            assert DEVICES[gpu].sm >= 90 or not config.pdl


def test_the_longest_rows_of_a_config_are_split_as_far_as_the_kernels_go() -> None:
    wide = replace(CASES["kimi-k2"].problem().spec, hidden=2**20, intermediate=64)
    problem = replace(CASES["kimi-k2"].problem(), spec=wide, top_k=1)
    found = [c for tokens in (1, 2, 64) for c in tuning_configs(problem, of("h200"), tokens)]
    assert max(c.up.split_k for c in found if isinstance(c, TritonConfig)) == MAX_SPLIT_K


def exhausted(problem: Problem, machine: Machine, tokens: int, time: dict[str, float]) -> tuple[TritonConfig, int]:
    """Return the best configuration and how many were tried, with a time to which each field adds independently."""
    timed: dict[Config, float] = {}
    while new := [c for c in tuning_configs(problem, machine, tokens, list(timed.items())) if c not in timed]:
        for c in new:
            penalties = (c.block_m != time["block_m"], c.up.block_n != time["up"], c.down.block_k != time["down"])
            timed[c] = 10.0 + sum(penalties) + 0.01 * (c.up.num_warps + c.down.num_warps)
    best = min(timed, key=timed.__getitem__)
    assert isinstance(best, TritonConfig)
    return best, len(timed)


def test_fields_are_tuned_one_after_the_other() -> None:
    problem, h200 = CASES["deepseek-v4-flash"].problem(), of("h200")
    own = heuristic(problem, h200, 64)
    best, tried = exhausted(problem, h200, 64, {"block_m": 16, "up": 32, "down": 128})
    assert (own.block_m, own.up.block_n, own.down.block_k) == (8, 64, 256)
    assert (best.block_m, best.up.block_n, best.down.block_k) == (16, 32, 128)
    assert tried < 100  # of some thousands


def test_nothing_new_is_tried_when_the_first_is_best() -> None:
    problem, h200 = CASES["gpt-oss-120b"].problem(), of("h200")
    own = heuristic(problem, h200, 1024)
    first = tuning_configs(problem, h200, 1024)
    timed = [(c, 1.0 if c == own else 2.0) for c in first]
    assert set(tuning_configs(problem, h200, 1024, timed)) <= set(first)


def test_configurations_as_data() -> None:
    config = TritonConfig(32, Tile(64, 128, 4, 3, 2), replace(Tile(), maxnreg=168), tail_block_m=8)
    assert TritonConfig.from_dict(config.to_dict()) == config
    for bad, where in (
        ({"block_m": 12}, "block_m"),
        ({"up": {"block_n": 48}}, "block_n"),
        ({"down": {"num_stages": 0}}, "num_stages"),
    ):
        with pytest.raises(PlanError, match=where):
            TritonConfig.from_dict(bad)


@pytest.mark.parametrize(
    "config",
    [
        {"block_m": 2**20},
        {"block_m": -16},
        {"tail_block_m": 16},  # not smaller than block_m
        {"block_m": 64, "tail_block_m": 12},
        {"up": {"block_n": 2**30}},
        {"up": {"block_k": 1024}},
        {"up": {"num_warps": 64}},
        {"up": {"num_warps": 0}},
        {"down": {"num_stages": 1000}},
        {"down": {"split_k": 2**40}},
        {"down": {"maxnreg": 256}},
        {"down": {"n_blocks_per_cta": 0}},
        {"down": {"n_blocks_per_cta": 10**9}},
        {"block_m": 256, "up": {"block_n": 256, "num_warps": 1}},
        {"up": {"block_n": 256, "block_k": 512, "num_warps": 2}},
        {"block_scaled": True, "up": {"split_k": 2}},
        {"block_scaled": True, "down": {"block_k": 16}},
    ],
    ids=str,
)
def test_no_row_of_a_table_makes_an_absurd_launch(config: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="expected"):
        TritonConfig.from_dict(config)
