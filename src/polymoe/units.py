"""Bytes, times and counts as text."""

from __future__ import annotations

__all__ = ["format_bytes", "format_count", "format_tokens", "format_us"]


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
