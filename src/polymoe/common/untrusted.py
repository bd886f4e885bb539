"""The border where Transformers, tokenizers and torch read what a checkpoint says.

They check little, and a wrong value leads to any exception, anywhere. Here it becomes an error of the checkpoint that
names the file and the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polymoe.errors import CheckpointError, MissingDependency, PolymoeError

_LONGEST = 500  # characters of a cause
_INSTALL = "install the package that is missing"


@contextmanager
def reading(
    where: str, expected: str, *, hint: str | None = None, renamed: tuple[str, str] = ("", "")
) -> Iterator[None]:
    """Convert exceptions of libraries, but neither polymoe's errors, nor bugs of its own code, nor faults of the
    machine.

    Args:
        where: the file at fault, or the checkpoint.
        expected: what would have been valid.
        hint: what the user can do about the checkpoint.
        renamed: a path in messages of the library, and what to write instead.

    Raises:
        CheckpointError: for an exception of a library; it is the cause.
        MissingDependency: if the library needs a package that is not installed.
    """
    try:
        yield
    except (PolymoeError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except ImportError as error:
        raise MissingDependency(where, expected=expected, got=_text(error, *renamed), hint=_INSTALL) from error
    except BaseException as error:
        # tokenizers' panics are no Exception, like KeyboardInterrupt, which is not ours.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if _raised_by(error).startswith("polymoe."):
            raise
        raise CheckpointError(where, expected=expected, got=_text(error, *renamed), hint=hint) from error


def _raised_by(error: BaseException) -> str:
    """The name of the module whose line raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))


def _text(error: BaseException, path: str, instead: str) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = text.replace(path, instead) if path else text
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
