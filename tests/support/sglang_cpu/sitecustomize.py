"""Python imports this when it starts: packages that SGLang imports, and that have no build for machines without a GPU.

Whatever is imported from them fails when it is called. On the way of these tests through SGLang nothing is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = ("sgl_kernel", "torchvision")


class Absent:
    """Stands for a function or a class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not in this environment")


class AbsentModule(types.ModuleType):
    """A package in which every name is :class:`Absent`."""

    __path__: list[str] = []  # noqa: RUF012  # a package's
    __version__ = "1.0"

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of ``ABSENT`` where nothing else does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(Finder())
