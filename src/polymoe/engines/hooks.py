"""Hooks: names of an engine that polymoe uses, the check that it has them as expected, and a way to replace methods.

The engines' own tests do not cover these names, and they change without notice. Each adapter has a table of them, which
is compared with the installed engine before anything is patched or loaded; those of vLLM and SGLang also with the
sources of several versions, in ``tests/engines``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_MARK = "wrapped_by_polymoe"


@dataclass(frozen=True, slots=True)
class Hook:
    """A name of an engine, and what is used of it.

    Attributes:
        module: where it is defined.
        text: ``"f: a, b"`` is a function with parameters, or a class with attributes, called a and b. ``"f(a, b, c=)"``
            is called, or overridden, with a and b in this order and c by name, and needs no more than these;
            ``"f(a, ...)"`` may need more. ``"f"`` is anything that a module has. f may be a method, ``Class.method``.
    """

    module: str
    text: str

    @property
    def name(self) -> str:
        """Of the function, method or class."""
        return re.split(r"[:(]", self.text)[0]

    @property
    def path(self) -> str:
        """Module and name."""
        return f"{self.module}.{self.name}"

    def __str__(self) -> str:
        return f"{self.module}.{self.text}"

    @property
    def uses(self) -> tuple[str, ...]:
        """What follows the name."""
        return tuple(re.findall(r"[\w.=]+", self.text.removeprefix(self.name)))

    def difference(self) -> str | None:
        """What the installed engine has instead: "none", "no NAMES" or another signature; None if it has the hook."""
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return "none"
        if "(" in self.text:
            signature = inspect.signature(found)
            return None if self._fits(signature) else f"{self.path}{signature}"
        has = _names(found)
        lacking = [name for name in self.uses if name not in has and not hasattr(found, name)]
        return f"no {', '.join(lacking)}" if lacking else None

    def _fits(self, signature: inspect.Signature) -> bool:
        leading = [name for name in self.uses if not name.endswith(("=", "..."))]
        by_name = [name.removesuffix("=") for name in self.uses if name.endswith("=")]
        parameters = list(signature.parameters.values())
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = {p.name for p in parameters if p.default is p.empty and p.kind not in variable}
        return (
            positional[: len(leading)] == leading
            and all(name in signature.parameters or any_keyword for name in by_name)
            and ("..." in self.uses or needed <= {*leading, *by_name})
        )


def _names(found: Any) -> set[str]:
    """Parameters of a function, or fields of a class, which are not attributes of it."""
    if not inspect.isclass(found):
        return set(inspect.signature(found).parameters) if callable(found) else set()
    return {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of an engine's class, once in a process, by ``around``: it gets the method before the arguments
    of each call."""
    theirs = getattr(owner, name)
    if hasattr(theirs, _MARK):
        return

    @functools.wraps(theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(theirs, *args, **kwargs)

    setattr(ours, _MARK, True)
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(ours) if static else ours)


def differences(hooks: Iterable[Hook]) -> Iterator[tuple[Hook, str]]:
    """Yield each hook that the installed engine does not have as expected, with what it has instead."""
    for hook in hooks:
        got = hook.difference()
        if got is not None:
            yield hook, got


def missing_hooks(hooks: Iterable[Hook]) -> tuple[str, ...]:
    """Return what the installed engine lacks, by path."""
    return tuple(hook.path if got == "none" else f"{hook.path} ({got})" for hook, got in differences(hooks))
