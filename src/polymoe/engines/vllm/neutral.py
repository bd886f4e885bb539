"""The choice of vLLM's own backend, kept out of the way while a method is made that polymoe takes over.

Most of vLLM's methods choose a backend when they are made: they log it, pad sizes for it, may transpose weights for it,
and raise where there is none. :func:`neutral_choice` makes those functions answer a plain backend instead.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["neutral_choice"]

_ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
_LAYERS = "vllm.model_executor.layers."
_SELECTORS = {
    "select_deepseek_v4_mxfp4_moe_backend": "mxfp4",
    "select_fp8_moe_backend": "fp8",
    "select_mxfp4_moe_backend": "mxfp4",
    "select_nvfp4_moe_backend": "nvfp4",
    "select_unquantized_moe_backend": "unquantized",
    "select_wna16_moe_backend": "int_wna16",
}
"""The functions by name, and the modules that define them."""

_PLAIN = ("EMULATION", "TRITON", "XPU")
"""Backends for which no version pads or transposes, best first."""


@contextlib.contextmanager
def neutral_choice() -> Iterator[list[str]]:
    """Make every function that chooses a backend answer a plain one; yields the list of what vLLM would have chosen.

    A function that this version of vLLM does not have is left out: then vLLM chooses, which costs a line in its log.
    """
    chosen: list[str] = []
    oracles = _oracles()
    replaced = {
        name: found
        for name, module in _SELECTORS.items()
        if module in oracles and (found := _selector(name, oracles[module], chosen))
    }
    # Modules that are imported meanwhile bind the replacement by name, so they are looked for again at the end.
    try:
        _rebind(dict(replaced.values()))
        yield chosen
    finally:
        _rebind({plain: original for original, plain in replaced.values()})


def _selector(name: str, oracle: ModuleType, chosen: list[str]) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return vLLM's function and its replacement, or None where there is no such function or no plain backend."""
    original, answer = getattr(oracle, name, None), _plain_backend(oracle)
    if original is None or answer is None:
        return None

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


def _oracles() -> dict[str, ModuleType]:
    """The modules that choose backends, all imported."""
    try:
        package = importlib.import_module(_ORACLES)
    except ImportError:
        return {}
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(ImportError):
            found[module.name] = importlib.import_module(f"{_ORACLES}.{module.name}")
    return found


def _rebind(replacements: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions in every module of vLLM's layers that refers to one by its name."""
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(_LAYERS):
            continue
        for selector in _SELECTORS:
            bound = vars(module).get(selector)
            if bound is not None and bound in replacements:
                setattr(module, selector, replacements[bound])
