"""The command that installs polymoe, and the error that names it where a package is missing.

Hints, README, the documentation and scripts name it; a test compares all of them with :func:`install_command`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from polymoe.errors import MissingDependency

_CLONE = Path(__file__).parents[3]
_COMMAND, _WHERE = "pip install -e '.{extra}'", "in a clone of polymoe: "
"""There is no release yet, so what works is a clone of the repository. A release changes these two."""


def install_command(extra: str) -> str:
    """Return the command line that installs polymoe with an extra of ``pyproject.toml``: ``pip install -e
    '.[serve]'``; an empty one is without."""
    return _COMMAND.format(extra=f"[{extra}]" if extra else "")


def install_hint(extra: str) -> str:
    """Return the hint for a package of an extra that is not installed: the command that installs the extra in a clone;
    where polymoe was installed from elsewhere, one that installs its packages, because there is no release whose extra
    pip could install."""
    try:
        if not (_CLONE / "pyproject.toml").is_file():
            return f"for the extra {extra!r}: pip install {shlex.join(_packages(extra))}"
    except metadata.PackageNotFoundError:  # polymoe is on the path without its metadata
        pass
    return _WHERE + install_command(extra)


@contextmanager
def packages_of(extra: str, what: str) -> Iterator[None]:
    """Around imports of an extra's packages, which may not be installed.

    Args:
        extra: of ``pyproject.toml``.
        what: what needs them, for the message.

    Raises:
        MissingDependency: for a package that cannot be imported.
    """
    try:
        yield
    except MissingDependency:
        raise
    except ImportError as error:
        expected = f"the packages of the extra {extra!r}"
        raise MissingDependency(what, expected=expected, got=str(error), hint=install_hint(extra)) from error


def _packages(extra: str) -> list[str]:
    """What an extra of the installed polymoe requires, with those of the extras that it includes."""
    found = []
    for line in metadata.requires("polymoe") or ():
        required, _, marker = line.partition(";")
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            nested = re.fullmatch(r"polymoe\[([\w,-]+)\]", required.strip())
            found += [p for name in nested[1].split(",") for p in _packages(name)] if nested else [required.strip()]
    return found
