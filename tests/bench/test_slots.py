"""Calls that miss exactly so many experts, and what cannot be made of a layer."""

from __future__ import annotations

import pytest

from polymoe.bench.slots import missing_calls
from polymoe.errors import ArgumentError
from polymoe.layer.slots import LeastRecentlyUsed


@pytest.mark.parametrize(("experts", "top_k"), [(128, 4), (256, 6), (160, 8), (384, 8), (16, 4)])
def test_each_call_misses_so_many_experts_however_often_the_cycle_runs(experts: int, top_k: int) -> None:
    for misses in range(top_k + 1):
        cache = LeastRecentlyUsed(experts // 4)
        calls = missing_calls(experts, experts // 4, top_k, misses)
        assert all(len(set(call)) == top_k and min(call) >= 0 and max(call) < experts for call in calls)
        for repetition in range(4):
            found = {len(cache.place(sorted(call))) for call in calls}
            assert repetition == 0 or found == {misses}


@pytest.mark.parametrize(("experts", "slots", "misses"), [(16, 4, 5), (16, 4, -1), (9, 8, 4)])
def test_calls_that_do_not_exist(experts: int, slots: int, misses: int) -> None:
    with pytest.raises(ArgumentError, match="misses"):
        missing_calls(experts, slots, 4, misses)
