"""Bytes, times, counts, ranges of numbers and lists of names as text."""

from __future__ import annotations

from collections.abc import Sequence

_PATTERN = 8
"""Numbers in equal steps above 1 are all listed if they are fewer."""


def format_bytes(count: float) -> str:
    """Format bytes: ``"1.2 MiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def format_us(time_us: float) -> str:
    """Format microseconds: ``"75.2 us"``, ``"180 us"``, from 1000 on in milliseconds: ``"2.34 ms"``."""
    if time_us < 1000:
        return f"{time_us:.0f} us" if time_us >= 100 else f"{time_us:.1f} us"
    return f"{time_us / 1000:.0f} ms" if time_us >= 1e5 else f"{time_us / 1000:.3g} ms"


def format_tokens(tokens: str) -> str:
    """Format a range of token counts: ``"1 token"``, ``"2-32 tokens"``, ``"64+ tokens"``."""
    return f"{tokens} token{'s' * (tokens != '1')}"


def format_count(count: int) -> str:
    """Format a number with three digits: ``"840"``, ``"131,072"`` as ``"131,000"``, ``"4.61 million"``."""
    if count < 1000:
        return str(count)
    if count < 10**6:
        digits = len(str(count)) - 3
        return f"{round(count, -digits):,}"
    return f"{count / 1e6:.3g} million" if count < 10**9 else f"{count / 1e9:.3g} billion"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers: ``(3, 4, 5, 9)`` gives ``"3-5, 9"``; every second one of 1 to 47 gives
    ``"1, 3, 5, ..., 47"``."""
    texts, rest = [], list(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        count = next((i for i, number in enumerate(rest) if number != rest[0] + i * step), len(rest))
        if step > 1 and count < _PATTERN:
            count = 1
        run, rest = rest[:count], rest[count:]
        if count == 1:
            texts.append(str(run[0]))
        else:
            texts.append(f"{run[0]}-{run[-1]}" if step == 1 else f"{run[0]}, {run[1]}, {run[2]}, ..., {run[-1]}")
    return ", ".join(texts)


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` names and the number of the others, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
