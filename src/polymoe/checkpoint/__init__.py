"""Checkpoints: files and configs in, expert weights in one convention out, and back.

Its names are resolved on first use: what only looks for a checkpoint (``checkpoint.hub``) does without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymoe.checkpoint.load import Checkpoint
    from polymoe.checkpoint.write import write_checkpoint

__all__ = ["Checkpoint", "write_checkpoint"]
_WHERE = {"Checkpoint": "load", "write_checkpoint": "write"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    return found
