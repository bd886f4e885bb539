"""The command that installs polymoe (leaf: imports nothing of ours).

Hints, README, the documentation and scripts name it; a test compares all of them with :func:`install_command`.
"""

from __future__ import annotations

__all__ = ["install_command", "install_hint"]

_COMMAND, _WHERE = "pip install -e '.{extra}'", "in a clone of polymoe: "
"""There is no release yet, so what works is a clone of the repository. A release changes these two."""


def install_command(extra: str) -> str:
    """Return the command line that installs polymoe with an extra of ``pyproject.toml``: ``pip install -e
    '.[serve]'``; an empty one is without."""
    return _COMMAND.format(extra=f"[{extra}]" if extra else "")


def install_hint(extra: str) -> str:
    """Return the hint for a package of an extra that is not installed."""
    return _WHERE + install_command(extra)
