"""The environment variables that polymoe reads (leaf: imports no other module of polymoe)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["VARIABLES", "cache_directory", "downloads_allowed"]

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "POLYMOE": "polymoe in a serving engine: 1 (the default) runs the layers that it can run, 0 none, and require "
        "makes it an error to leave a layer to the engine",
        "POLYMOE_ACTIVATIONS": "activations of the experts in a serving engine (default: E4M3 for E4M3 weights)",
        "POLYMOE_API_KEY": "bearer token that clients of `polymoe serve` must send, and that `eval` and `bench serve` "
        "send (same as --api-key)",
        "POLYMOE_BACKEND": "the backend in a serving engine (default: auto)",
        "POLYMOE_CACHE": "directory of polymoe's cache, such as tuned tables (default: polymoe in the "
        "user's cache directory, $XDG_CACHE_HOME or ~/.cache)",
        "POLYMOE_DOWNLOAD_KERNELS": "1 lets other libraries download compiled kernels that are not installed (default: "
        "backends that would are refused)",
        "POLYMOE_LAYERS": "layers that polymoe runs in a serving engine: 0-3,7, or !0 for all others (default: all)",
        "POLYMOE_ROLE": "token counts to plan for in a serving engine: decode, prefill or mixed (default: the engine's "
        "own role)",
    }
)
"""Every variable by name, with its meaning."""


def cache_directory() -> Path:
    """Return the directory of polymoe's cache, which may not exist yet."""
    chosen = os.environ.get("POLYMOE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polymoe"


def downloads_allowed() -> bool:
    """Return whether other libraries may download compiled kernels."""
    return os.environ.get("POLYMOE_DOWNLOAD_KERNELS") == "1"
