"""Torch imported at its first use: it takes longer than all that ``polymoe explain`` does with sizes alone.

The modules that such a command imports have ``import torch`` at their top as usual, but use it within functions only.
Names of torch, such as ``Tensor``, they import for type checkers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class _Postponed(ModuleType):
    """A module that is executed when an attribute is read that it does not have yet.

    ``importlib.util.LazyLoader`` executes it at the next ``import`` statement, which reads ``__spec__``.
    """

    def __getattr__(self, name: str) -> Any:
        module: Any = self
        spec = module.__spec__
        module.__class__ = ModuleType
        module.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(spec.name, None)
            raise
        return getattr(module, name)


def postpone_torch() -> None:
    """Make every later ``import torch`` of this process one that loads it when an attribute is read.

    For commands without threads: a second thread could see a module that the first is still executing.
    """
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _Postponed
    del module.__path__  # imports of submodules read it: they load torch first
    sys.modules["torch"] = module


class Dtypes(Mapping[str, "torch.dtype"]):
    """A table of torch's dtypes by other names, which imports torch when a dtype is read."""

    def __init__(self, **names: str) -> None:
        self._names = names

    def __getitem__(self, name: str) -> torch.dtype:
        import torch

        return getattr(torch, self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def itemsize(self, name: str) -> int:
        """Return the bytes of a number, without torch: its name has the bits."""
        return int(re.findall(r"\d+", self._names[name])[0]) // 8

    def name_of(self, dtype: torch.dtype) -> str | None:
        """Return the first name of a dtype, or None if it has none."""
        return next((name for name in self if self[name] == dtype), None)
