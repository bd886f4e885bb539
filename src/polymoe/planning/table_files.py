"""Files of measured times: one file per GPU, with one JSON object per line.

The package contains some. ``polymoe tune`` writes the user's own to the cache directory.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from polymoe.environment import cache_directory
from polymoe.errors import FormatError
from polymoe.planning.measured import Measured, Table, newest

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["add", "file_name", "installed", "parse", "read", "user_file"]


def file_name(device: str) -> str:
    """Return the file name of a GPU's table: ``"h200.jsonl"``, ``"nvidia-rtx-4000-ada.jsonl"``."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-.") + ".jsonl"


def user_file(device: str) -> Path:
    """Return the path to which ``polymoe tune`` writes a GPU's rows. The file may not exist yet."""
    return cache_directory() / "tables" / file_name(device)


def parse(text: str, where: str) -> list[Measured]:
    """Return the rows in the text of a table; ``where`` names it in errors.

    Raises:
        FormatError: for a line that is not a row.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(Measured.from_dict(json.loads(line)))
        except FormatError as error:
            what = f"{where}, line {number}, {error.where}"
            raise FormatError(what, expected=error.expected, got=error.got) from error
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}, line {number}", expected="a row as JSON", got=line[:80]) from error
    return rows


def read(path: Path | Traversable) -> list[Measured]:
    """Return the rows of a file; an empty list if the file does not exist.

    Raises:
        FormatError: if it is not a table.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise FormatError(str(path), expected="UTF-8 text", got=str(error)) from error


@cache
def installed(device: str) -> Table:
    """Return the user's rows and the shipped rows of a GPU. Files are read once per process.

    A file that cannot be read, or is not a table, is ignored with a warning. Times then come from the cost model.
    """
    mine, shipped = user_file(device), resources.files("polymoe.planning") / "tables" / file_name(device)
    return Table((_rows_of(mine), _rows_of(shipped) if shipped.is_file() else ()))


def _rows_of(file: Path | Traversable) -> tuple[Measured, ...]:
    try:
        return tuple(read(file))
    except (FormatError, OSError) as error:
        warnings.warn(f"measured times are not used: {error}\n  hint: the next `polymoe tune` keeps this file aside")
        return ()


def add(path: Path, rows: Sequence[Measured]) -> Path | None:
    """Merge rows into a file, replacing older rows with the same key.

    Several processes may write the same file: each one reads, merges and renames it under a lock.

    Returns:
        None, or the new path of an existing file that was not a table (``h200.jsonl.corrupt-1``).
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        aside = None
        try:
            earlier = read(path)
        except FormatError:
            earlier, aside = [], _set_aside(path)
        new = path.with_name(path.name + ".new")  # nobody else writes it while the lock is held
        new.write_text("".join(json.dumps(row.to_dict()) + "\n" for row in newest([*earlier, *rows])), encoding="utf-8")
        new.replace(path)
    installed.cache_clear()
    return aside


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside
