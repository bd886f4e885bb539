"""The exceptions polymoe raises (leaf: imports nothing of ours).

.. code-block:: text

    PolymoeError
    ├── CheckpointError (ValueError)            a checkpoint that cannot be read as what it claims to be
    │   └── CheckpointNotFound (FileNotFoundError)   no such file, directory, repository or layer
    ├── FormatError (ValueError)                bytes, shapes or dtypes that do not fit an encoding
    ├── ArgumentError (ValueError)              an argument of a call: wrong shape, dtype, device, range or name
    ├── UnsupportedProblem (NotImplementedError)  no backend, or not the named one, runs this problem here
    ├── PlanError (RuntimeError)                a plan that does not cover a call or does not fit its weights
    ├── VerificationError (RuntimeError)        a backend's result differs from the reference
    ├── ServerError (ConnectionError)           a server that cannot be reached, or that refuses or fails
    └── MissingDependency (ImportError)         an optional package is not installed

Each message says where the error is, what was expected, what was found, and what to do about it::

    model.layers.3.mlp.experts.gate_up_proj_scales: expected shape [8, 384, 6], got [8, 384, 5]
      hint: the shard is from another revision of the checkpoint; download it again
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CheckpointNotFound",
    "FormatError",
    "MissingDependency",
    "PlanError",
    "PolymoeError",
    "ServerError",
    "UnsupportedProblem",
    "VerificationError",
    "nearest",
    "printable",
    "quoted",
    "renamed",
]

_LONGEST, _LONGEST_LINE = 80, 1000
_SHORT = reprlib.Repr()  # repr of the start of lists and objects only, however long or deep they are
_SHORT.maxstring = _SHORT.maxother = _LONGEST


class PolymoeError(Exception):
    """Base of every exception polymoe raises on purpose.

    Args:
        where: the file, tensor, layer or argument at fault.
        expected: what would have been valid.
        got: what was found instead.
        hint: what the user can do.

    All but ``where`` may be left out; ``str(error)`` joins what is given.
    """

    def __init__(
        self, where: str, *, expected: str | None = None, got: str | None = None, hint: str | None = None
    ) -> None:
        self.where, self.expected, self.got, self.hint = where, expected, got, hint
        self.args = (where, expected, got, hint)  # super().__init__ is what torch.compile cannot trace

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling passes positional arguments, which do not fit here; errors must survive a process boundary.
        rebuild = partial(type(self), expected=self.expected, got=self.got, hint=self.hint)
        return rebuild, (self.where,)

    def __str__(self) -> str:
        where, expected, got, hint = map(_bounded, (self.where, self.expected, self.got, self.hint))
        facts = [f"expected {expected}"] if expected else []
        facts += [f"got {got}"] if got else []
        text = where + (": " + ", ".join(facts) if facts else "")
        return text + (f"\n  hint: {hint}" if hint else "")


class CheckpointError(PolymoeError, ValueError):
    """A checkpoint cannot be read: a file or tensor is missing, truncated or contradictory."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """The named checkpoint, file or layer does not exist."""


class FormatError(PolymoeError, ValueError):
    """Bytes, shapes or dtypes do not fit their declared encoding."""


class ArgumentError(PolymoeError, ValueError):
    """An argument of a call has a wrong shape, dtype, device, range or name."""


class UnsupportedProblem(PolymoeError, NotImplementedError):
    """No backend, or not the named one, can run this problem on this machine. The message lists every reason."""


class PlanError(PolymoeError, RuntimeError):
    """A plan does not cover the call, or packed weights do not belong to it."""


class VerificationError(PolymoeError, RuntimeError):
    """A backend's result on real experts differs from the reference by more than the format's tolerance."""


class ServerError(PolymoeError, ConnectionError):
    """A server cannot be reached, refuses the key or model of every request, or fails repeatedly."""


class MissingDependency(PolymoeError, ImportError):
    """An optional package is needed and not installed; the hint names the extra that installs it."""


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """Around what may raise: errors get ``name(where)`` instead of where they are, as callers know it."""
    try:
        yield
    except PolymoeError as error:
        error.where = name(error.where)
        raise


def quoted(value: object) -> str:
    """Return the ``repr`` of a value that comes from outside, shortened to 80 characters, for a message."""
    text = _SHORT.repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def printable(text: str) -> str:
    """Return a text with escapes for what is neither printable nor a line break: what controls a terminal, and halves
    of surrogate pairs, which no stream can write."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _bounded(text: str | None) -> str:
    """Return a text for a message: printable, and with short lines, whatever a file or a library put into it."""
    lines = printable(text or "").split("\n")
    return "\n".join(line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..." for line in lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known one, if any is close, then all of them.

    ``nearest("mxpf4", ["mxfp4", "nvfp4"])`` is ``"did you mean 'mxfp4'? known: mxfp4, nvfp4"``.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) and len(name) <= _LONGEST else []
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + ", ".join(names)
