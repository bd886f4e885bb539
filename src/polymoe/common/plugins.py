"""Backends and layouts of other packages: tables that add what is registered under an entry-point group.

A distribution registers an object or a function without arguments, which returns the object. Its attributes
``backends`` and ``layouts``, each optional, are iterables of what :class:`~polymoe.backends.base.Backend` and
:class:`~polymoe.layouts.base.Layout` describe::

    [project.entry-points."polymoe.backends"]
    mykernels = "mykernels.polymoe:plugin"

Entry points are loaded once, on the first access to a table. One that fails is a warning, never an error, and so is a
backend or layout that raises an exception when it is asked what it can run: it is rejected.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, TypeVar

GROUP = "polymoe.backends"
"""The entry-point group."""

_REQUIRED = {
    "backends": (
        "layouts", "handles", "check", "configure", "predict", "tuning_configs", "compile", "gradients", "bind",
    ),
    "layouts": ("check", "nbytes", "pack", "unpack"),
}  # fmt: skip

V = TypeVar("V")


@dataclass(frozen=True, slots=True, eq=False)
class Plugin:
    """A loaded entry point: its name, its backends and layouts, and in ``error`` why none of them are used."""

    name: str
    backends: tuple[Any, ...] = ()
    layouts: tuple[Any, ...] = ()
    error: str = ""


_lock = threading.RLock()
_found: list[Plugin] | None = None
_loading = False


def plugins() -> list[Plugin]:
    """Return every entry point of the group, loaded by the first call; none while they are being loaded."""
    global _found, _loading
    with _lock:
        if _found is None and not _loading:
            _loading = True
            try:
                _found = [load(point) for point in sorted(metadata.entry_points(group=GROUP), key=lambda p: p.name)]
            finally:
                _loading = False
        return _found or []


def from_plugin(entry: object) -> bool:
    """Whether another package registered the backend or layout."""
    return any(entry is theirs for plugin in plugins() for theirs in (*plugin.backends, *plugin.layouts))


class PluginError(Exception):
    """A backend or layout ``name`` of another package raised an exception. ``str`` gives its class and message."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name = name


@contextmanager
def guarded(entry: Any) -> Iterator[None]:
    """Turn exceptions into PluginError, with a warning, if another package registered ``entry``."""
    try:
        yield
    except PluginError:
        raise
    except Exception as error:  # whatever another package raises
        if not from_plugin(entry):
            raise
        failure = PluginError(entry.name, error)
        warnings.warn(f"plug-in {entry.name!r} of {GROUP} is not used: {failure}")
        raise failure from error


class PluginTable(MutableMapping[str, V]):
    """Polymoe's own entries by name, then those of other packages, which are loaded on first access."""

    def __init__(self, ours: Iterable[V], part: Literal["backends", "layouts"]) -> None:
        self._part: Literal["backends", "layouts"] = part
        self._entries: dict[str, V] = {entry.name: entry for entry in ours}  # type: ignore[attr-defined]
        self._complete = False

    def _all(self) -> dict[str, V]:
        if not self._complete:
            with _lock:
                found = plugins()
                if not self._complete and not _loading:
                    self._complete = True
                    for plugin in found:
                        self._add(plugin)
        return self._entries

    def _add(self, plugin: Plugin) -> None:
        for entry in getattr(plugin, self._part):
            if entry.name in self._entries:
                what = f"{self._part.removesuffix('s')} {entry.name!r}"
                warnings.warn(f"plug-in {plugin.name!r}: {what} is not used, because the name is taken", stacklevel=2)
            else:
                self._entries[entry.name] = entry

    def __getitem__(self, name: str) -> V:
        return self._all()[name]

    def __setitem__(self, name: str, entry: V) -> None:
        self._all()[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def load(point: metadata.EntryPoint) -> Plugin:
    """Load one entry point; a failure is a warning, and :attr:`Plugin.error`."""
    try:
        given = point.load()
        if callable(given):
            given = given()
        parts: dict[str, tuple[Any, ...]] = {part: tuple(getattr(given, part, ())) for part in _REQUIRED}
        for part, entries in parts.items():
            for entry in entries:
                _require(part, entry)
        if not any(parts.values()):
            raise TypeError("it has neither backends nor layouts")
        return Plugin(point.name, parts["backends"], parts["layouts"])
    except Exception as error:  # whatever another package raises
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"plug-in {point.name!r} ({point.value}) of {GROUP} is not used: {what}", stacklevel=2)
        return Plugin(point.name, error=what)


def _require(part: str, entry: Any) -> None:
    if not isinstance(getattr(entry, "name", None), str):
        raise TypeError(f"{part}: {entry!r} has no name")
    missing = [name for name in _REQUIRED[part] if not hasattr(entry, name)]
    if missing:
        raise TypeError(f"{part}: {entry.name!r} lacks {', '.join(missing)}")
