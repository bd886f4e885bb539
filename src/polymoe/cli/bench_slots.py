"""``polymoe bench slots``: recorded routing, replayed against ways to choose which experts stay on the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymoe.cli.options import Options, Output, listed, option
from polymoe.cli.output import print_json, print_table, say
from polymoe.cli.progress import Progress
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    from polymoe.bench.slot_policies import Replay


def _slots(text: str, option: str) -> tuple[float, ...]:
    """Parse numbers, and shares below 1."""
    found = listed(text, option)
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}|[1-9][0-9]?%", part) for part in found):
        raise ArgumentError(option, expected="numbers or shares such as 8,16,25%", got=repr(text))
    return tuple(int(part[:-1]) / 100 if part.endswith("%") else int(part) for part in found)


class _Replayed(Options, heading="What is replayed"):
    trace: Path = option(..., "File that run or serve wrote with --record-routing.", show_default=False)
    slots: tuple[float, ...] = option(
        "25%,50%,75%", "Slots of each layer, as numbers or shares of its experts, separated by commas.",
        parse=_slots,
    )  # fmt: skip
    link: float | None = option(
        None, "Rate of the link from host memory, in GB/s. Default: what doctor --link has measured, or nominal rates.",
        min=0.001, max=1e6,
    )  # fmt: skip


def command(replayed: _Replayed, output: Output) -> None:
    """Replay recorded routing: hits, misses, and the time that the misses take on the link, by slots and by policy.

    Policies are: least recently used, as polymoe does; least frequently used, where a use counts half after a number of
    calls; least recently used of one pool for all layers; and a clairvoyant one, which no policy exceeds. Calls that
    need more experts than there are slots, such as prompts, leave the slots as they are, and are not counted.
    """
    from polymoe.bench.slot_policies import replays, slots_of_layers
    from polymoe.layer.routing_trace import RoutingTrace
    from polymoe.machine import Machine
    from polymoe.machine.link import links

    trace = RoutingTrace.load(replayed.trace)
    slots = {f"{n:.0%}" if n < 1 else str(n): slots_of_layers(n, trace) for n in replayed.slots}
    if replayed.link is None:
        rates = links(Machine.of(None).device.name)  # names, and bytes/s
    else:
        rates = [(f"{replayed.link:g} GB/s", replayed.link * 1e9)]
    calls = list(trace.calls())
    rows: list[dict[str, Any]] = []
    with Progress("bench slots") as progress:
        for text, counts in slots.items():
            progress.update(f"{text} slots")
            swept = sum(len(call.needed) > counts[call.layer] for call in calls)
            shared = {"slots": text, "slots_of_layers": counts, "calls": len(calls), "calls_not_counted": swept}
            rows += [{**shared, **_plain(result, rates)} for result in replays(calls, trace, counts)]
    sizes = sorted({f"{row.top_k} of {row.experts} experts" for row in trace.layers})
    title = f"{trace.model}: {len(trace.layers)} layers, {', '.join(sizes)}"
    if output.json:
        links = [{"name": name, "bytes_per_s": rate} for name, rate in rates]
        print_json({"model": trace.model, "layers": len(trace.layers), "links": links, "replays": rows})
        return
    columns = ("slots", "policy", "hits", "misses/token", *(f"ms/token, {name}" for name, _ in rates))
    print_table(columns, [_cells(row) for row in rows], title)
    for text, row in {row["slots"]: row for row in rows}.items():
        if row["calls_not_counted"]:
            say(f"{text} slots: {row['calls_not_counted']} of {row['calls']} calls need more experts and do not count")


def _plain(result: Replay, rates: Sequence[tuple[str, float]]) -> dict[str, Any]:
    copied = result.bytes_per_token
    seconds = [None if copied is None else copied / rate for _, rate in rates]
    return {**asdict(result), "hit_rate": result.hit_rate, "link_seconds_per_token": seconds}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    rate, misses, seconds = row["hit_rate"], row["misses_per_token"], row["link_seconds_per_token"]
    times = ("-" if s is None else f"{1e3 * s:.3g}" for s in seconds)
    counts = sorted(set(row["slots_of_layers"]))
    slots = row["slots"] if not row["slots"].endswith("%") else f"{row['slots']}: {' or '.join(map(str, counts))}"
    hits = "-" if rate is None else f"{rate:.1%}"
    return (slots, row["policy"], hits, "-" if misses is None else f"{misses:.2f}", *times)
