"""Humming's kernels as a backend: another library's, compiled at run time."""

from __future__ import annotations

from polymoe.backends.humming.backend import Humming
from polymoe.backends.humming.config import HummingConfig

__all__ = ["Humming", "HummingConfig"]
