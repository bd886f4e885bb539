"""Files of measured times: one file per GPU, with one JSON object per line.

The package contains some. ``polymoe tune`` writes the user's own to the cache directory.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from polymoe.common.atomic import replace_file
from polymoe.common.environment import cache_directory
from polymoe.common.json_input import parse_json, read_fields
from polymoe.errors import ArgumentError, FormatError
from polymoe.planning.measured import Measured, Table, newest

if TYPE_CHECKING:
    from importlib.abc import Traversable


def file_name(device: str) -> str:
    """Return the file name of a GPU's table: ``"h200.jsonl"``, ``"nvidia-rtx-4000-ada.jsonl"``."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-.") + ".jsonl"


def user_file(device: str) -> Path | None:
    """Return the path to which ``polymoe tune`` writes a GPU's rows, which may not exist yet; None without a cache."""
    directory = cache_directory()
    return None if directory is None else directory / "tables" / file_name(device)


@dataclass(frozen=True, slots=True)
class Lines:
    """The content of a table: its rows, and an error for each line that is not a row, such as one half written."""

    rows: tuple[Measured, ...] = ()
    errors: tuple[FormatError, ...] = ()


def parse(content: bytes, where: str) -> Lines:
    """Return the lines of a table; ``where`` names it in errors."""
    rows, errors = [], []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            rows.append(read_fields(Measured, parse_json(line)))
        except FormatError as error:
            what = f"{where}, line {number}, {error.where}"
            errors.append(FormatError(what, expected=error.expected, got=error.got))
        except ValueError:
            got = line[:80].decode(errors="replace")
            errors.append(FormatError(f"{where}, line {number}", expected="a row as JSON", got=got))
    return Lines(tuple(rows), tuple(errors))


def read_lines(path: Path | Traversable) -> Lines:
    """Return the lines of a file; none if the file does not exist.

    Raises:
        OSError: if the file cannot be read.
    """
    try:
        return parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        return Lines()


def read(path: Path | Traversable) -> list[Measured]:
    """Return the rows of a file; an empty list if the file does not exist.

    Raises:
        FormatError: for a line that is not a row.
    """
    lines = read_lines(path)
    if lines.errors:
        raise lines.errors[0]
    return list(lines.rows)


@cache
def installed(device: str) -> Table:
    """Return the user's rows and the shipped rows of a GPU. Files are read once per process.

    A file that cannot be read, and lines that are not rows, are ignored with a warning. Times that are then missing
    come from the cost model.
    """
    mine, shipped = user_file(device), resources.files("polymoe.planning") / "tables" / file_name(device)
    return Table((_rows_of(mine) if mine is not None else (), _rows_of(shipped) if shipped.is_file() else ()))


def _rows_of(file: Path | Traversable) -> tuple[Measured, ...]:
    try:
        lines = read_lines(file)
    except OSError as error:
        warnings.warn(f"measured times are not used: {error}")
        return ()
    if lines.errors:
        count = f"{len(lines.errors)} of {len(lines.rows) + len(lines.errors)} measured times are not used"
        hint = "the next `polymoe tune` keeps this file aside and its rows in the table"
        warnings.warn(f"{count}, the first: {lines.errors[0]}\n  hint: {hint}")
    return lines.rows


def add(path: Path, rows: Sequence[Measured]) -> Path | None:
    """Merge rows into a file, replacing older rows with the same key.

    Several processes may write the same file: each one reads, merges and replaces it under a lock.

    Returns:
        None, or the copy of an existing file with lines that are not rows (``h200.jsonl.corrupt-1``).

    Raises:
        OSError: if the file cannot be read or written.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        lines = read_lines(path)
        aside = _copy_aside(path) if lines.errors else None
        kept = sorted(newest([*lines.rows, *rows]), key=lambda row: (*row.key[:4], row.triton or ""))
        replace_file(path, "".join(json.dumps(row.to_dict()) + "\n" for row in kept))
    installed.cache_clear()
    return aside


def check_addable(path: Path) -> None:
    """Raise ArgumentError unless rows can be added to a table, which takes new files beside it; creates its directory.

    To be called before minutes of measuring.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        hint = "--out names another table, POLYMOE_CACHE another cache"
        raise ArgumentError(
            str(path), expected="a directory that can be written to", got=str(error), hint=hint
        ) from error


def _copy_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    replace_file(aside, path.read_bytes())
    return aside
