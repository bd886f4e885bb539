"""The environment variables that polymoe reads (leaf: imports no other module of polymoe)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "POLYMOE": "polymoe in a serving engine: 1 (the default) runs the layers that it can run, 0 none, and require "
        "makes it an error to leave a layer to the engine",
        "POLYMOE_ACTIVATIONS": "activations of the experts in a serving engine (default: E4M3 for E4M3 weights)",
        "POLYMOE_API_KEY": "bearer token that clients of `polymoe serve` must send, and that `bench serve` sends (same "
        "as --api-key)",
        "POLYMOE_BACKEND": "the backend in a serving engine (default: auto)",
        "POLYMOE_CACHE": "directory of polymoe's cache, such as tuned tables (default: polymoe in the "
        "user's cache directory, $XDG_CACHE_HOME or ~/.cache)",
        "POLYMOE_CHECK": "packed experts that are compared with what was read, byte for byte, when a layer is loaded: "
        "every (the default), or sample for four of them",
        "POLYMOE_DOWNLOAD_KERNELS": "1 lets other libraries download compiled kernels that are not installed (default: "
        "backends that would are refused)",
        "POLYMOE_EXPERT_MEMORY": "GPU memory for experts in vLLM, such as 16GiB or 32slots; all experts lie in host "
        "memory then (default: all lie on the GPU)",
        "POLYMOE_LAYERS": "layers that polymoe runs in a serving engine: 0-3,7, or !0 for all others (default: all)",
        "POLYMOE_ROLE": "token counts to plan for in a serving engine: decode, prefill or mixed (default: the engine's "
        "own role)",
    }
)
"""Every variable by name, with its meaning."""


def cache_directory() -> Path | None:
    """Return the directory of polymoe's cache, which may not exist yet.

    None, which is said once, where it names an unknown home directory, as in a container without an entry for its user.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = os.environ.get("POLYMOE_CACHE") or os.path.join(base, "polymoe")
    found = os.path.expanduser(chosen)
    if found.startswith("~"):
        _say_once(f"no home directory for {chosen}: nothing is cached; POLYMOE_CACHE names another directory")
        return None
    return Path(found)


@cache
def _say_once(text: str) -> None:
    logging.getLogger("polymoe").warning(text)


def downloads_allowed() -> bool:
    """Return whether other libraries may download compiled kernels."""
    return os.environ.get("POLYMOE_DOWNLOAD_KERNELS") == "1"
