"""Bytes and times as text."""

from __future__ import annotations

__all__ = ["format_bytes", "format_us"]


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
