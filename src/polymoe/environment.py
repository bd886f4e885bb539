"""Environment variables: the one table of those polymoe reads, and what they mean (leaf: imports nothing of ours)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["VARIABLES", "cache_directory"]

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "POLYMOE_API_KEY": "bearer token that clients of `polymoe serve` must send, and that `eval` and `bench serve` "
        "send (same as --api-key)",
        "POLYMOE_CACHE": "directory of what polymoe may make again, such as tuned tables (default: polymoe in the "
        "user's cache directory, $XDG_CACHE_HOME or ~/.cache)",
    }
)
"""Every variable by name, with its meaning."""


def cache_directory() -> Path:
    """Where polymoe keeps what it may make again; it may not exist yet."""
    chosen = os.environ.get("POLYMOE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polymoe"
