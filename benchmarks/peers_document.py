"""Tables of docs/performance/peers.md, plots of plots.md: records of benchmarks/peer_times.py, later ones of ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends_document import markdown
from share_plot import write_png

from polymoe.bench.cases import CASES, Case
from polymoe.bench.records import Record
from polymoe.machine import Machine
from polymoe.planning.measured import Table, newest
from polymoe.planning.select import select

LETTERS = {
    "humming": "H", "vllm": "V", "deepgemm": "D", "triton_kernels": "T", "flashinfer": "F", "monomoe": "F",
    "quack": "Q", "finegrained": "K",
}  # fmt: skip
"""Peers in the tables."""
LABELS = {
    "humming": "Humming", "vllm": "vLLM", "deepgemm": "DeepGEMM", "flashinfer": "FlashInfer", "monomoe": "FlashInfer",
    "quack": "QuACK", "finegrained": "finegrained-fp8",
}  # fmt: skip
AHEAD = 0.98
"""A peer is ahead if its time is less than this share of ours."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is compared."""

    case: str
    format: str
    activations: str
    routing: str

    @classmethod
    def of(cls, r: Record) -> Row:
        return cls(r.case, r.format, r.activations, r.routing)

    @property
    def of_peers(self) -> tuple[str, str, bool, str]:
        """Rows with the same peers: E4M3 activations count as one kind, since peers may scale x otherwise than this
        library."""
        return self.case, self.format, self.activations != "16bit", self.routing

    @property
    def head(self) -> str:
        """Name in the tables; E4M3 activations are named where the weights do not imply them."""
        named = self.activations != "16bit" and not self.format.startswith("fp8")
        parts = [
            f"`{self.case}`",
            self.format,
            *[self.activations] * named,
            *[self.routing] * (self.routing != "uniform"),
        ]
        return ", ".join(parts)


@dataclass(slots=True)
class Times:
    """Of one row: our records at each token count, by backend, and each peer's."""

    ours: dict[int, Record] = field(default_factory=dict)
    peers: dict[str, dict[int, Record]] = field(default_factory=dict)

    def fastest(self, tokens: int) -> Record | None:
        """The fastest peer."""
        found = [by[tokens] for by in self.peers.values() if tokens in by]
        return min(found, key=lambda r: r.median_us, default=None)


def case_of(name: str) -> Case:
    """The named case, or one whose changed sizes are part of its name."""
    base, _, changes = name.partition("[")
    sizes = {text[0]: int(text[2:]) for text in changes.rstrip("]").split(", ") if text}
    return CASES[base].changed(
        hidden=sizes.get("H"), intermediate=sizes.get("F"), experts=sizes.get("E"), top_k=sizes.get("A")
    )


def times(device: str, compared: Sequence[Record], others: Iterable[Record], table: Table) -> dict[Row, Times]:
    """The rows of ``compared``, and those of ``others`` with the same peers. Of ours, the record of the backend that
    ``auto`` takes on that device with ``table``, the newest of ``compared`` and ``others``."""
    found = newest([*compared, *others])
    kinds = {Row.of(r).of_peers: None for r in compared if r.peer}
    rows = {row: Times() for kind in kinds for row in dict.fromkeys(map(Row.of, found)) if row.of_peers == kind}
    own: dict[tuple[Row, str, int], Record] = {}
    for r in found:
        for row in rows if r.peer else ():
            if row.of_peers == Row.of(r).of_peers:
                rows[row].peers.setdefault(r.peer or "", {})[r.tokens] = r
        if r.peer is None and Row.of(r) in rows:
            own[Row.of(r), r.backend, r.tokens] = r
    for row, of_row in rows.items():
        ours = {tokens: r for (of, _, tokens), r in own.items() if of == row}
        for tokens in sorted(ours):
            mode = ours[tokens].activations
            plan = select(case_of(row.case).problem(row.format, mode), Machine.of(device), table=table).plan
            backend = plan.step(tokens).backend if plan else ""
            if (row, backend, tokens) in own:
                of_row.ours[tokens] = own[row, backend, tokens]
    return {row: of_row for row, of_row in rows.items() if of_row.ours}


def by_case(found: dict[Row, Times]) -> tuple[dict[Row, Times], dict[Row, Times]]:
    """The rows of named cases, and those with other sizes."""
    named = {row: of for row, of in found.items() if "[" not in row.case}
    return named, {row: of for row, of in found.items() if row not in named}


def ratios(found: dict[Row, Times]) -> str:
    """The fastest peer's time over ours, bold where it is ahead; a letter where the peer is not the row's usual one."""
    columns = sorted({t for times in found.values() for t in times.ours})
    ahead = cells = 0
    lines = []
    for row, of in found.items():
        peers = [LETTERS[peer.peer or ""] for t in of.ours if (peer := of.fastest(t))]
        usual = max(peers, key=peers.count, default="")
        line = [row.head, usual]
        for t in columns:
            mine, peer = of.ours.get(t), of.fastest(t)
            if mine is None or peer is None:
                line.append("")
                continue
            ratio = peer.median_us / mine.median_us
            cells, ahead = cells + 1, ahead + (ratio < AHEAD)
            letter = LETTERS[peer.peer or ""]
            text = f"{ratio:.2f}{'' if letter == usual else ' ' + letter}" + "†" * (mine.commit != peer.commit)
            line.append(f"**{text}**" if ratio < AHEAD else text)
        lines.append(line)
    return f"{markdown(['', 'peer', *map(str, columns)], lines)}\nA peer is ahead in {ahead} of {cells} cells.\n"


MANY = 1024
"""Tokens from which tables of many rows begin."""


def many_rows(found: dict[Row, Times]) -> str:
    """Microseconds from 1,024 tokens on: of this library, with its share of the floor, and of the fastest peer."""
    columns = sorted({t for of in found.values() for t in of.ours if t >= MANY})
    lines = []
    for row, of in found.items():
        ours = {t: f"{r.median_us:.0f} ({r.share:.2f})" for t, r in of.ours.items() if t >= MANY}
        peers = {t: f"{p.median_us:.0f} {LETTERS[p.peer or '']}" for t in ours if (p := of.fastest(t))}
        for head, name, times in ((row.head, "polymoe", ours), ("", "best peer", peers)):
            lines += [[head, name, *(times.get(t, "") for t in columns)]] if ours else []
    return markdown(["", "us", *map(str, columns)], lines)


def _draw(axes: Any, of: Times, over: Mapping[int, float]) -> None:
    """Draw a line of ours and one of each peer: ``over``, by tokens, divided by the time."""
    lines = {"polymoe": of.ours, **{LABELS.get(name, name): by for name, by in of.peers.items()}}
    for n, (label, by) in enumerate(lines.items()):
        points = [(t, over[t] / by[t].median_us) for t in sorted(by) if t in over]
        style: dict[str, Any] = {"linewidth": 2.5} if n == 0 else {"linestyle": "--", "linewidth": 1.5}
        axes.plot(*zip(*points, strict=True), marker="osD^v"[n % 5], markersize=5, label=label, **style)


def rates_picture(found: dict[Row, Times], device: str, path: Path) -> None:
    """Draw TFLOP/s from 1,024 tokens on, a panel for each row with E4M3 inputs, beside the device's rate."""
    from matplotlib.figure import Figure

    rows = [row for row in found if row.activations != "16bit"]
    figure = Figure(figsize=(6 * len(rows), 4.4), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), sharey=True), rows, strict=True):
        problem = case_of(row.case).problem(row.format, row.activations)
        flops = 6 * problem.spec.hidden * problem.spec.intermediate * problem.top_k  # gate, up and down of a token
        work = {t: flops * t / 1e6 for t in found[row].ours if t >= MANY}
        _draw(axes, found[row], work)
        rate = (Machine.of(device).device.flops_fp8 or 0) / 1e12
        axes.axhline(rate, color="grey", linewidth=0.8, label=f"nominal rate, {rate:,.0f}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(work), [str(t) for t in sorted(work)], fontsize=13)
        axes.set_title(row.head.replace("`", ""), fontsize=14)
        axes.set_xlabel("tokens", fontsize=14)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("TFLOP/s", fontsize=14)
    figure.axes[-1].legend(fontsize=12)
    write_png(figure, path)


def name_of(row: Row) -> str:
    """The name of a row's plot."""
    return re.sub(r"[^a-z0-9]+", "-", row.head.replace("`", "").lower()) + ".png"


def plots(found: dict[Row, Times]) -> str:
    """The page of plots: one for each row."""
    shown = [f"## {row.head}\n\n![Share of the floor over tokens](plots/{name_of(row)})\n" for row in found]
    return "\n".join([_PLOTS, *shown])


_PLOTS = """# Plots of the comparison with other libraries

One plot for each row of the first [table](peers.md), on one H200: the least time that the GPU allows
([floor](method.md#floor)) as a share of the measured time, by tokens in a call. 1.0 is as fast as the GPU allows.
"""


def pictures(found: dict[Row, Times], folder: Path) -> None:
    """Draw the plots, with letters that can be read on a telephone."""
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)
    for row, of in found.items():
        figure = Figure(figsize=(6, 4.4), layout="constrained")
        axes = figure.subplots()
        floors = {t: r.floor_us for t, r in of.ours.items()}
        _draw(axes, of, floors)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(floors)[::2], [str(t) for t in sorted(floors)[::2]], fontsize=13)
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 1.05)
        axes.tick_params(axis="y", labelsize=13)
        axes.set_xlabel("tokens", fontsize=14)
        axes.set_ylabel("share of the floor", fontsize=14)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=13)
        write_png(figure, folder / name_of(row))
