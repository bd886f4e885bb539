"""A plot of records: share of the floor over tokens, one line for each backend."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polymoe.bench.records import Record
from polymoe.common.atomic import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot", "write_png"]


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG, or replace it, whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    replace_file(path, buffer.getvalue())


def plot(
    records: Sequence[Record], path: Path, others: Mapping[str, Sequence[tuple[int, float]]] | None = None
) -> None:
    """Write a PNG of records that share case, format, routing and device.

    Args:
        records: one line for each backend and kind of activations.
        path: of the PNG.
        others: further lines by label, each of (tokens, share of the floor) in the order of tokens.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for backend, activations in dict.fromkeys((r.backend, r.activations) for r in records):
        line = sorted((r.tokens, r.share) for r in records if (r.backend, r.activations) == (backend, activations))
        label = backend if activations == "16bit" else f"{backend}, {activations}"
        axes.plot(*zip(*line, strict=True), marker="o", label=label)
    for i, (label, points) in enumerate((others or {}).items()):
        grey = str(0.5 / (i + 1))  # darker each
        axes.plot(*zip(*points, strict=True), marker="sD^v"[i % 4], linestyle="--", color=grey, label=label)
    counts = sorted({r.tokens for r in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(t) for t in counts])
    axes.set_ylim(0, max(1.0, *(1.05 * r.share for r in records)))
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("tokens")
    axes.set_ylabel("share of the floor (floor / time)")
    r = records[0]
    axes.set_title(f"{r.case}, {r.format}, {r.routing} routing, {r.device}")
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(figure, path)
