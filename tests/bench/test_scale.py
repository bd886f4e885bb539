"""The simulation of wide expert parallelism: rows are neither lost nor invented, and copies balance them."""

from __future__ import annotations

import pytest
import scale  # type: ignore

from polymoe.backends.cost import chances


@pytest.mark.parametrize("ranks", [8, 32, 72, 144, 320])
@pytest.mark.parametrize("copies", [0, 32])
@pytest.mark.parametrize("exponent", [0.0, 1.1])
def test_every_row_is_on_one_rank(ranks: int, copies: int, exponent: float) -> None:
    chance = chances(256, 8, exponent) if exponent else (8 / 256,) * 256
    found = scale.loads(chance, ranks, copies)
    assert len(found) == ranks
    assert sum(found) == pytest.approx(sum(chance))


def test_copies_balance_skewed_routing() -> None:
    chance = chances(256, 8, 1.1)
    assert max(scale.loads(chance, 32, 32)) < 1.05 * 8 / 32 < 0.5 * max(scale.loads(chance, 32, 0))


def test_experts_of_published_deployments() -> None:
    """DeepSeek: 9 in prefill on 32 ranks, 2 in decode on 144. LMSYS: 4 on 72."""
    assert [scale.slots(256, ranks, 32) for ranks in (32, 72, 144, 320)] == [9, 4, 2, 1]


def test_exchange_takes_the_published_time() -> None:
    """DeepEP's low-latency kernels with 128 tokens: 155 us to the experts and 273 us back, on 32 ranks."""
    assert scale.exchange_us(128 * 8, 7168, 32, scale.LOW_LATENCY) == pytest.approx(155 + 273, rel=0.02)
