"""Tables and plots of server benchmarks: the same columns on the terminal and in Markdown, and a PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polymoe.bench.plot import write_png
from polymoe.bench.serving.record import LOADS, ServingRecord
from polymoe.common.atomic import replace_file

__all__ = ["columns", "markdown", "plot", "table", "write_markdown"]

_NONE = "n/a"
_Cell = Callable[[ServingRecord], str]


def _number(value: float | None, digits: int = 1) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"


def _time(us: float | None, unit: str) -> str:
    value = None if us is None else us / {"s": 1e6, "ms": 1e3}[unit]
    return _number(value, 1 if value is not None and value >= 100 else 2)


def _percentiles(name: str, unit: str) -> _Cell:
    def cell(r: ServingRecord) -> str:
        found = getattr(r, name)
        return _NONE if found is None else " / ".join(_time(getattr(found, p), unit) for p in ("p50", "p90", "p99"))

    return cell


def _answered(r: ServingRecord) -> str:
    if r.answered == r.requests:
        return str(r.answered)
    others = [f"{n} {what}" for n, what in ((r.refused, "refused"), (r.failed, "failed")) if n]
    return f"{r.answered} of {r.requests} ({', '.join(others)})"


_ALWAYS: Sequence[tuple[str, _Cell]] = (
    ("input", lambda r: str(r.input_len)),
    ("output", lambda r: str(r.output_len)),
    ("answered", _answered),
)
_BATCH: Sequence[tuple[str, _Cell]] = (
    ("batch size", lambda r: f"{r.load:g}"),
    *_ALWAYS,
    ("latency (s)", lambda r: _time(r.duration_us, "s")),
    ("TTFT (s)", lambda r: _time(r.ttft_us and r.ttft_us.max, "s")),
    ("ITL (ms)", lambda r: _time(r.itl_us and r.itl_us.mean, "ms")),
    ("input tok/s", lambda r: _number(r.input_tps)),
    ("output tok/s", lambda r: _number(r.output_tps)),
)
_LOADED: Sequence[tuple[str, _Cell]] = (
    *_ALWAYS,
    ("duration (s)", lambda r: _time(r.duration_us, "s")),
    ("input tok/s", lambda r: _number(r.input_tps)),
    ("output tok/s", lambda r: _number(r.output_tps)),
    ("TTFT p50 / p90 / p99 (ms)", _percentiles("ttft_us", "ms")),
    ("ITL p50 / p90 / p99 (ms)", _percentiles("itl_us", "ms")),
    ("latency p50 / p90 / p99 (s)", _percentiles("latency_us", "s")),
)
_IF_KNOWN: Sequence[tuple[str, str, _Cell]] = (
    ("acceptance_length", "acceptance length", lambda r: _number(r.acceptance_length, 2)),
    ("input_cost", "input $/1M", lambda r: _number(r.input_cost, 3)),
    ("output_cost", "output $/1M", lambda r: _number(r.output_cost, 3)),
    ("total_cost", "$/1M", lambda r: _number(r.total_cost, 3)),
    ("cache_hit_rate", "cache hit rate", lambda r: _number(r.cache_hit_rate, 3)),
    ("tokens_per_joule", "tok/s/W", lambda r: _number(r.tokens_per_joule, 2)),
)


def columns(records: Sequence[ServingRecord]) -> list[tuple[str, list[str]]]:
    """Return the columns of records of one mode, heading and cells; columns without data are left out."""
    mode = records[0].mode
    chosen = list(_BATCH if mode == "batch" else ((LOADS[mode], lambda r: f"{r.load:g}"), *_LOADED))
    for field, heading, cell in _IF_KNOWN:
        if field == "total_cost" and mode == "batch":
            continue  # a batch has prefill and decode rates
        if any(getattr(r, field) is not None for r in records):
            chosen.append((heading, cell))
    return [(heading, [cell(r) for r in records]) for heading, cell in chosen]


def title(r: ServingRecord) -> str:
    """Return a title: server, model, GPUs and their price."""
    gpus = f"{r.gpus} x {r.device or 'GPU'}" if r.device or r.gpus > 1 or r.gpu_price is not None else ""
    price = "" if r.gpu_price is None else f" at ${r.gpu_price:g} an hour"
    return f"{r.label}: {r.model}" + (f" on {gpus}{price}" if gpus else "")


def remarks(records: Sequence[ServingRecord]) -> list[str]:
    """Return notes and errors of each row, one line for each."""
    lines = []
    for r in records:
        lines += [f"{r}: {note}" for note in r.notes]
        lines += [f"{r}: {count} x {message}" for message, count in r.errors.items()]
    return lines


def table(records: Sequence[ServingRecord]) -> Any:
    """Return a table of rich, for the terminal."""
    from rich.table import Table

    found = columns(records)
    result = Table(*(heading for heading, _ in found), title=title(records[0]))
    for row in zip(*(cells for _, cells in found), strict=True):
        result.add_row(*row)
    return result


def markdown(records: Sequence[ServingRecord]) -> str:
    """Return the table with its title, remarks and commands."""
    found = columns(records)
    lines = [f"**{title(records[0])}**", "", "| " + " | ".join(heading for heading, _ in found) + " |"]
    lines.append("|" + " ---: |" * len(found))
    lines += ["| " + " | ".join(row) + " |" for row in zip(*(cells for _, cells in found), strict=True)]
    if notes := remarks(records):
        lines += ["", *(f"- {note}" for note in notes)]
    last = {r.command: r for r in records}  # of each command
    for command, r in last.items():
        lines += ["", f"`{command}`, polymoe {r.commit}, {r.date}"]
    return "\n".join([*lines, ""])


def write_markdown(path: Path, records: Sequence[ServingRecord]) -> None:
    """Write :func:`markdown` to a file, or replace it, whole or not at all."""
    replace_file(path, markdown(records))


def plot(records: Sequence[ServingRecord], path: Path) -> None:
    """Write a PNG of records of one mode over the load: throughput on the left, latencies on the right."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    mode = records[0].mode
    figure = Figure(figsize=(11, 5), layout="constrained")
    rates, times = figure.subplots(1, 2)
    series = list(dict.fromkeys(r.series for r in records))
    curves = _curves(mode)
    for color, key in enumerate(series):
        line = sorted((r for r in records if r.series == key), key=lambda r: r.load)
        for axes, half in zip((rates, times), curves, strict=True):
            for _, style, value in half:
                points = [(r.load, v) for r in line if (v := value(r)) is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=f"C{color}", markersize=4)
    loads = sorted({r.load for r in records})
    for axes, half, what in zip((rates, times), curves, ("tokens per second", "milliseconds"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.2, high * 1.2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.set_xlabel(LOADS[mode])
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        color = "C0" if len(series) == 1 else "grey"
        handles = [axes.plot([], [], style, color=color, markersize=4)[0] for _, style, _ in half]
        axes.legend(handles, [name for name, _, _ in half], fontsize="small")
    if len(series) > 1:
        firsts = [next(r for r in records if r.series == key) for key in series]
        handles = [Line2D([], [], color=f"C{color}") for color in range(len(series))]
        names = [_name(r, firsts) for r in firsts]
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), fontsize="small")
    models = ", ".join(dict.fromkeys(r.model for r in records))
    figure.suptitle(f"{models}: {'one batch' if mode == 'batch' else f'over {LOADS[mode]}'}")
    write_png(figure, path)


_Curve = tuple[str, str, Callable[[ServingRecord], float | None]]


def _curves(mode: str) -> tuple[Sequence[_Curve], Sequence[_Curve]]:
    """Return name, line style and value of each curve: rates, and times."""

    def ms(name: str, which: str) -> Callable[[ServingRecord], float | None]:
        return lambda r: None if getattr(r, name) is None else getattr(getattr(r, name), which) / 1e3

    rates = (("output", "o-", lambda r: r.output_tps), ("input", "s--", lambda r: r.input_tps))
    if mode == "batch":
        return rates, (("ITL", "o-", ms("itl_us", "mean")), ("TTFT", "s--", ms("ttft_us", "max")))
    return rates, (
        ("ITL p50", "o-", ms("itl_us", "p50")),
        ("ITL p99", "o:", ms("itl_us", "p99")),
        ("TTFT p50", "s--", ms("ttft_us", "p50")),
        ("TTFT p99", "s:", ms("ttft_us", "p99")),
    )


def _name(r: ServingRecord, among: Sequence[ServingRecord]) -> str:
    """Return a label that distinguishes this line from the others."""
    values: Sequence[Callable[[ServingRecord], object]] = (
        lambda x: x.label,
        lambda x: x.model,
        lambda x: x.device,
        lambda x: f"{x.input_len} in, {x.output_len} out",
    )
    return ", ".join(str(value(r)) for value in values if len({value(x) for x in among}) > 1)
