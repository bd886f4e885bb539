"""A plot of records of experts in host memory: times of calls beside the least that the link allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from share_plot import write_png

from polymoe.bench.records import Record
from polymoe.common.shapes import ceil_div

__all__ = ["Point", "by_misses", "by_tokens", "plot"]

_CASE = re.compile(r"([^[]+)\[(\d+) slots(?:, (\d+) misses)?\](?:\[stack of (\d+)\])?")


class Point(NamedTuple):
    """A measurement: misses or tokens, and the time and the floor in microseconds."""

    at: int
    time_us: float
    floor_us: float


def by_misses(records: Sequence[Record]) -> dict[str, list[Point]]:
    """Calls of one token by the number of misses, for each case and its slots."""
    lines: dict[str, list[Point]] = {}
    for record, name, misses, _ in _offloaded(records):
        if misses is not None:
            lines.setdefault(name, []).append(Point(misses, record.median_us, record.floor_us))
    return {name: sorted(points) for name, points in lines.items()}


def by_tokens(records: Sequence[Record]) -> dict[str, list[Point]]:
    """Larger calls by tokens: those of one layer, and of stacks those of the deepest."""
    larger = [(record, name, layers) for record, name, misses, layers in _offloaded(records) if misses is None]
    lines: dict[str, list[Point]] = {}
    for record, name, layers in larger:
        if layers in (1, max(layers for _, other, layers in larger if other == name)):
            lines.setdefault(name, []).append(Point(record.tokens, record.median_us, record.floor_us))
    return {name: sorted(points) for name, points in lines.items()}


def plot(records: Sequence[Record], path: Path) -> None:
    """Write a PNG with a panel for each line of the two."""
    from matplotlib.figure import Figure

    panels = [(*line, "misses of one token", "µs", 1) for line in by_misses(records).items()]
    panels += [(*line, "tokens", "ms a layer", 1000) for line in by_tokens(records).items()]
    figure = Figure(figsize=(10.5, 6.5), layout="constrained")
    grid = figure.subplots(ceil_div(len(panels), 3), 3, squeeze=False).flat
    for axes, (name, points, of, unit, scale) in zip(grid, panels, strict=False):
        places = [point.at for point in points] if of != "tokens" else list(range(len(points)))
        times = [point.time_us / scale for point in points]
        floors = [point.floor_us / scale for point in points]
        axes.plot(places, times, color="#3949ab", marker="o", label="measured")
        axes.plot(places, floors, color="#e65100", linestyle="--", label="floor: resident layer and link")
        for place, time in zip(places, times, strict=True):
            text = f"{time:.0f}" if unit == "µs" else f"{time:.1f}"
            shift, side = ((-3, 5), "right") if unit == "µs" else ((0, 7), "center")
            axes.annotate(text, (place, time), shift, textcoords="offset points", ha=side, fontsize=9)
        axes.set_xticks(places, [str(point.at) for point in points])
        axes.margins(x=0.15)
        axes.set_ylim(0, 1.18 * max(times))
        axes.set_title(name, fontsize=11)
        axes.set_xlabel(of)
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
    figure.axes[len(panels) - 1].legend(loc="lower right", fontsize=9)
    figure.suptitle(f"A layer with its experts in host memory, one {records[0].device.upper()}")
    write_png(figure, path)


def _offloaded(records: Sequence[Record]) -> list[tuple[Record, str, int | None, int]]:
    """Records of layers with slots: the case with its slots, misses of a call of one token, layers of the stack."""
    found = []
    for record in records:
        if case := _CASE.fullmatch(record.case):
            name, slots, misses, layers = case.groups()
            found.append((record, f"{name}, {slots} slots", None if misses is None else int(misses), int(layers or 1)))
    return found
