"""The Triton backend: every format on every GPU since Ampere."""

from __future__ import annotations

from polymoe.backends.triton.backend import Triton
from polymoe.backends.triton.config import Tile, TritonConfig

__all__ = ["Tile", "Triton", "TritonConfig"]
