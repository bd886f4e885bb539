"""Tables of server benchmarks: the same columns on the terminal and in documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polymoe.bench.serving.record import ServingRecord

_NONE = "n/a"
_Cell = Callable[[ServingRecord], str]


def _number(value: float | None, digits: int = 1) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"


def _time(us: float | None, unit: str) -> str:
    value = None if us is None else us / {"s": 1e6, "ms": 1e3}[unit]
    return _number(value, 1 if value is not None and value >= 100 else 2)


def _answered(r: ServingRecord) -> str:
    if r.answered == r.batch_size:
        return str(r.answered)
    others = [f"{n} {what}" for n, what in ((r.refused, "refused"), (r.failed, "failed")) if n]
    return f"{r.answered} of {r.batch_size} ({', '.join(others)})"


_BATCH: Sequence[tuple[str, _Cell]] = (
    ("batch size", lambda r: str(r.batch_size)),
    ("input", lambda r: str(r.input_len)),
    ("output", lambda r: str(r.output_len)),
    ("answered", _answered),
    ("latency (s)", lambda r: _time(r.duration_us, "s")),
    ("TTFT (s)", lambda r: _time(r.ttft_us and r.ttft_us.max, "s")),
    ("ITL (ms)", lambda r: _time(r.itl_us and r.itl_us.mean, "ms")),
    ("input tok/s", lambda r: _number(r.input_tps)),
    ("output tok/s", lambda r: _number(r.output_tps)),
)
_IF_KNOWN: Sequence[tuple[str, _Cell]] = (
    ("input $/1M", lambda r: _number(r.input_cost, 3)),
    ("output $/1M", lambda r: _number(r.output_cost, 3)),
    ("cache hit rate", lambda r: _number(r.cache_hit_rate, 3)),
    ("tok/s/W", lambda r: _number(r.tokens_per_joule, 2)),
)


def columns(records: Sequence[ServingRecord]) -> list[tuple[str, list[str]]]:
    """Return the columns, heading and cells; columns of ``_IF_KNOWN`` without data are left out."""
    always, if_known = ([(heading, [cell(r) for r in records]) for heading, cell in of] for of in (_BATCH, _IF_KNOWN))
    return always + [column for column in if_known if set(column[1]) != {_NONE}]


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
