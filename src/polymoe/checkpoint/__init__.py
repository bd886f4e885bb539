"""Checkpoints: files and configs in, expert weights in one convention out, and back."""

from __future__ import annotations

from polymoe.checkpoint.load import Checkpoint
from polymoe.checkpoint.write import write_checkpoint

__all__ = ["Checkpoint", "write_checkpoint"]
