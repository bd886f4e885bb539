"""The configuration of a call of Humming's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from polymoe.backends.config import Config

__all__ = ["HummingConfig"]


@dataclass(frozen=True, slots=True)
class HummingConfig(Config):
    """Which tiles a call runs.

    Attributes:
        rows: the number of expanded rows for which Humming's heuristics choose the tiles; 0 for the call's own.
    """

    rows: int = 0
