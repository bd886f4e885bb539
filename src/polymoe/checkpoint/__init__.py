"""Checkpoints: files and configs in, expert weights in one convention out, and back."""

from __future__ import annotations

from polymoe.checkpoint.load import Checkpoint

__all__ = ["Checkpoint"]
