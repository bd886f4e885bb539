"""Opens the files of a checkpoint: every file that any verb reads passes through here.

A checkpoint may come from anybody. A file is opened only if it is a regular one (a FIFO or a device would block, or
never end), and JSON is read only up to a size and a depth, with each key once, and with text that can be printed.

Links are followed, wherever they lead: the Hub's cache and shared stores are made of them. A name inside a file never
leads out of the directory: see :func:`is_inside`.
"""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

from polymoe.checkpoint.patterns import check_name
from polymoe.common.json_input import parse_json
from polymoe.errors import CheckpointError, CheckpointNotFound

MOST_BYTES = 64 * 2**20
"""Size of the largest file that is read whole: over twice the longest index and tokenizer of today's releases."""
MOST_DIMENSIONS = 8
"""Of a tensor."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def exists(path: Path) -> bool:
    """Return whether there is a file, of any kind, with this name.

    Raises:
        CheckpointError: for a name that cannot be looked up: too long, or in a directory that may not be entered.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        _refuse_name(path, error)
    return True


def is_inside(name: str) -> bool:
    """Return whether a file's name in a checkpoint stays inside its directory. Only the name counts: see above for
    links."""
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    absolute = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    return bool(name) and name.isprintable() and not absolute and ".." not in parts


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Read a file of text: a config, a part of a tokenizer, a chat template.

    Args:
        path: the file.
        most: the largest size in bytes that is accepted.

    Raises:
        CheckpointNotFound: if there is no such file.
        CheckpointError: if it is not a regular file, too large, or unreadable.
    """
    size = check_regular(path)
    if size > most:
        raise CheckpointError(str(path), expected=f"at most {most} bytes", got=str(size))
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        _refuse_name(path, error)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        CheckpointNotFound: if there is no such file.
        CheckpointError: as for :func:`read_bytes` and :func:`parse_object`.
    """
    return parse_object(read_bytes(path), str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. ``Infinity`` is accepted: releases of Nemotron-H have it in ``time_step_limit``.

    Raises:
        CheckpointError: if it is not JSON in UTF-8, not an object, too deep, has a key twice, or NaN, or half of a
            surrogate pair. ``where`` names it.
    """
    try:
        value = parse_json(data, infinity=True, unique_keys=True, surrogates=False)
    except ValueError as error:
        hint = "correct it, or download it again"
        raise CheckpointError(where, expected="JSON", got=str(error), hint=hint) from error
    if not isinstance(value, dict):
        raise CheckpointError(where, expected="a JSON object", got=type(value).__name__)
    return value


def open_weights(path: Path) -> Any:
    """Open a safetensors file and check its header; tensors are mapped, not read.

    The library checks most of it when it opens the file: that dtypes are known, that sizes agree with shapes and do not
    overflow, and that the tensors fill the file without gaps or overlaps.

    Returns:
        safetensors' handle.

    Raises:
        CheckpointNotFound: if there is no such file.
        CheckpointError: if it is not a regular file, truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open  # the command line looks for names without it

    size = check_regular(path, hint="complete the download of the checkpoint")
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if MOST_BYTES < length <= size:
                raise CheckpointError(
                    str(path), expected=f"a header of at most {MOST_BYTES} bytes", got=f"one of {length}"
                )
            header = file.read(min(length, size))
        handle: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            str(path),
            expected="a complete safetensors file",
            got=str(error),
            hint="the file is truncated or damaged; download it again",
        ) from error
    for name, entry in parse_object(header, f"{path}: header").items():
        check_name(name, f"{path}: names of tensors")
        shape = entry.get("shape", ())
        if len(shape) > MOST_DIMENSIONS or max(shape, default=0) >= 2**63:
            raise CheckpointError(
                f"{path}: tensor {name}",
                expected=f"at most {MOST_DIMENSIONS} dimensions, each below 2^63",
                got=f"{len(shape)} dimensions" if len(shape) > MOST_DIMENSIONS else str(shape),
            )
    return handle


def check_regular(path: Path, *, hint: str | None = None) -> int:
    """Require a regular file, or a link to one, without opening it; return its size in bytes.

    Raises:
        CheckpointNotFound: if there is no such file.
        CheckpointError: for a FIFO, a device, a socket or a directory.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise CheckpointNotFound(str(path), expected="this file", got="no such file", hint=hint) from None
    except (OSError, ValueError) as error:
        _refuse_name(path, error)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(
            str(path), expected="a regular file", got=_KINDS.get(stat.S_IFMT(found.st_mode), "another kind of file")
        )
    return found.st_size


def _refuse_name(path: Path, error: OSError | ValueError) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    raise CheckpointError(str(path)[:200], expected="a file that can be read", got=str(reason)) from error
