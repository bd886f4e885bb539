"""Hooks: names of an engine that a plug-in uses, and the check that the installed engine has them.

The engines' own tests do not cover these names. Each adapter has a table of them, which is compared with the sources of
several versions in ``tests/engines``, and with the installed one when the plug-in is registered.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Hook", "missing_hooks"]


@dataclass(frozen=True, slots=True)
class Hook:
    """A name of an engine.

    Attributes:
        module: where it is defined.
        name: of a function or method (``Class.method``), or of a class.
        uses: parameters of the function, or attributes of the class.
    """

    module: str
    name: str
    uses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def missing_hooks(hooks: Iterable[Hook]) -> tuple[str, ...]:
    """Return what the installed engine lacks, each with what was expected of it."""
    return tuple(lack for hook in hooks if (lack := _lack(hook)))


def _lack(hook: Hook) -> str:
    try:
        found: Any = importlib.import_module(hook.module)
        for part in hook.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return str(hook)
    if inspect.isclass(found):
        names = {f.name for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        lacking = [name for name in hook.uses if name not in names and not hasattr(found, name)]
    else:
        parameters = inspect.signature(found).parameters
        # A class method that is asked for by its class has lost its first parameter.
        lacking = [name for name in hook.uses if name not in parameters and name != "cls"]
    return f"{hook}({', '.join(lacking)})" if lacking else ""
