"""The choice of vLLM's own backend, kept out of the way while a method is made that polymoe takes over.

Most of vLLM's methods choose a backend when they are made: they log it, pad sizes for it, may transpose weights for it,
and raise where there is none. :func:`neutral_choice` makes those functions answer a plain backend instead.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from polymoe.engines.hooks import Hook
from polymoe.engines.vllm.hooks import SELECTORS

_LAYERS = "vllm.model_executor.layers."
_PLAIN = ("EMULATION", "TRITON", "XPU")
"""Backends for which no version pads or transposes, best first."""


def missing_plain_backends() -> tuple[str, ...]:
    """Return the functions that choose among backends of which none is plain. They must exist."""
    return tuple(
        f"{hook.path} with {' or '.join(_PLAIN)}"
        for hook in SELECTORS
        if _plain_backend(importlib.import_module(hook.module)) is None
    )


@contextlib.contextmanager
def neutral_choice() -> Iterator[list[str]]:
    """Make every function that chooses a backend answer a plain one; yields the list of what vLLM would have chosen."""
    chosen: list[str] = []
    replaced = [_replacement(hook, chosen) for hook in SELECTORS]
    # Modules that are imported meanwhile bind the replacement by name, so they are looked for again at the end.
    try:
        _rebind(dict(replaced))
        yield chosen
    finally:
        _rebind({plain: original for original, plain in replaced})


def _replacement(hook: Hook, chosen: list[str]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return vLLM's function and what takes its place."""
    oracle = importlib.import_module(hook.module)
    original, answer = getattr(oracle, hook.name), _plain_backend(oracle)

    def select(*args: Any, **kwargs: Any) -> tuple[Any, None]:
        chosen.append(_ask(oracle, original, args, kwargs))
        return answer, None

    return original, select


def _plain_backend(oracle: ModuleType) -> enum.Enum | None:
    for kind in vars(oracle).values():
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and kind.__module__ == oracle.__name__:
            return next((kind[name] for name in _PLAIN if name in kind.__members__), None)
    return None


def _ask(oracle: ModuleType, select: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Return the backend that vLLM would have chosen, without its log lines."""
    logger = vars(oracle).get("logger")
    vars(oracle)["logger"] = _Silent()
    try:
        backend, _ = select(*args, **kwargs)
    except Exception:  # whatever a backend's check raises
        return "none, as no backend of vLLM takes this layer here"
    else:
        return str(getattr(backend, "value", backend)).lower()
    finally:
        vars(oracle)["logger"] = logger


class _Silent:
    """A logger that says nothing, of whatever method."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _rebind(replacements: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions in every module of vLLM's layers that refers to one by its name."""
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(_LAYERS):
            continue
        for selector in SELECTORS:
            bound = vars(module).get(selector.name)
            if bound is not None and bound in replacements:
                setattr(module, selector.name, replacements[bound])
