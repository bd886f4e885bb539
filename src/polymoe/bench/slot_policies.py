"""Recorded routing, replayed: which experts would have been in slots, for other ways to choose what is evicted.

Calls that need more experts than a layer has slots, such as prompts, leave the slots as they are, as
:class:`~polymoe.layer.offload.OffloadedExperts` does outside of CUDA graphs. They are the same for every policy, and
are not counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest

from polymoe.errors import ArgumentError
from polymoe.layer.routing_trace import RoutingTrace, TracedCall
from polymoe.layer.slots import LeastRecentlyUsed


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy did with a trace.

    Attributes:
        policy: its name.
        hits, misses: distinct experts of calls that were in a slot, or had to be copied.
        misses_per_token, bytes_per_token: experts and bytes that all layers together copied, for each token; None if no
            call of some layer was counted.
    """

    policy: str
    hits: int
    misses: int
    misses_per_token: float | None
    bytes_per_token: float | None

    @property
    def hit_rate(self) -> float | None:
        """Share of hits; None if nothing was counted."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None


def _recency(calls: Sequence[TracedCall], slots: Sequence[int]) -> Iterator[int]:
    """Those used least recently are evicted, of each layer: what polymoe does."""
    layers = [LeastRecentlyUsed(count) for count in slots]
    for call in calls:
        yield len(layers[call.layer].place(call.needed))


def _pool(calls: Sequence[TracedCall], slots: Sequence[int]) -> Iterator[int]:
    """As :func:`_recency`, with as many slots in all, which any layer may have. Ties go by id."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    for call in calls:
        keys = [(call.layer, expert) for expert in call.needed]
        yield sum(key not in held for key in keys)
        for key in keys:
            held[key] = None
            held.move_to_end(key)
        while len(held) > sum(slots):
            held.popitem(last=False)


class _Ranked:
    """Slots of one layer, from which the experts of the lowest rank are evicted."""

    def __init__(self, slots: int) -> None:
        self._slots, self._held = slots, dict[int, float]()

    def place(self, ranks: dict[int, float]) -> int:
        """Put experts into slots, with their ranks from now on; return how many were in none."""
        missing = len(ranks.keys() - self._held.keys())
        others = [e for e in self._held if e not in ranks]
        for expert in nsmallest(len(self._held) + missing - self._slots, others, key=self._held.__getitem__):
            del self._held[expert]
        self._held |= ranks
        return missing


def _frequency(calls: Sequence[TracedCall], slots: Sequence[int], half_life: int) -> Iterator[int]:
    """Those used least often are evicted, of each layer. A use counts half after ``half_life`` calls of the layer."""
    layers, counts = [_Ranked(count) for count in slots], [0] * len(slots)
    uses: dict[tuple[int, int], float] = {}
    for call in calls:
        # Ranks are logarithms of uses as if all had been now, less the time, which is the same for all experts.
        counts[call.layer] += 1
        now = counts[call.layer] / half_life
        for key in ((call.layer, expert) for expert in call.needed):
            uses[key] = now + math.log2(2 ** (uses.get(key, -math.inf) - now) + 1)
        yield layers[call.layer].place({e: uses[call.layer, e] for e in call.needed})


def _clairvoyant(calls: Sequence[TracedCall], slots: Sequence[int]) -> Iterator[int]:
    """Those that are needed last, or never again, are evicted, of each layer: no policy has fewer misses."""
    layers = [_Ranked(count) for count in slots]
    after: dict[tuple[int, int], float] = {}
    ranks: list[dict[int, float]] = []
    for at in range(len(calls) - 1, -1, -1):
        call = calls[at]
        ranks.append({e: -after.get((call.layer, e), math.inf) for e in call.needed})
        after.update(((call.layer, e), at) for e in call.needed)
    for call in calls:
        yield layers[call.layer].place(ranks.pop())


POLICIES: dict[str, Callable[[Sequence[TracedCall], Sequence[int]], Iterator[int]]] = {
    "least recently used": _recency,
    **{f"frequency, half-life {n}": partial(_frequency, half_life=n) for n in (16, 64, 256)},
    "one pool": _pool,
    "clairvoyant": _clairvoyant,
}
"""Put the experts of each call into slots, of which each layer has so many; yield how many experts were in none."""


def slots_of_layers(wanted: float, trace: RoutingTrace) -> tuple[int, ...]:
    """Return the slots of each layer of a trace.

    Args:
        wanted: an int for each layer, or a share of its experts below 1; at least those of a token have room then.
        trace: has the layers.

    Raises:
        ArgumentError: for a number that is too small or too large for a layer.
    """
    if wanted < 1:
        return tuple(max(int(row.experts * wanted + 1e-6), row.top_k) for row in trace.layers)
    for row in trace.layers:
        if not row.top_k <= wanted < row.experts:
            expected = f"{row.top_k} (the experts of a token) to {row.experts - 1}, for {row.name}"
            raise ArgumentError("slots", expected=expected, got=str(wanted))
    return (int(wanted),) * len(trace.layers)


def replays(calls: Iterable[TracedCall], trace: RoutingTrace, slots: Sequence[int]) -> Iterator[Replay]:
    """Yield what each policy does with calls of a trace, whose layers have so many slots; see the module."""
    placed = [call for call in calls if len(call.needed) <= slots[call.layer]]
    tokens, needed = [0] * len(slots), sum(len(call.needed) for call in placed)
    for call in placed:
        tokens[call.layer] += call.tokens
    for name, policy in POLICIES.items():
        misses = [0] * len(slots)
        for call, missing in zip(placed, policy(placed, slots), strict=True):
            misses[call.layer] += missing
        each = copied = None
        if all(tokens):
            each = sum(m / t for m, t in zip(misses, tokens, strict=True))
            copied = sum(m / t * row.expert_bytes for m, t, row in zip(misses, tokens, trace.layers, strict=True))
        yield Replay(name, needed - sum(misses), sum(misses), each, copied)
