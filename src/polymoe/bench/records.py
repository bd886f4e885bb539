"""Records: one JSON line for each number, with what is needed to repeat it."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from polymoe.backend_names import current_name
from polymoe.errors import ArgumentError
from polymoe.machine import Machine

__all__ = ["Line", "Record", "Stamp", "append", "check_writable", "newest", "read", "read_lines", "source", "utc_now"]


_BACKENDS = ("backend", "implementation")  # fields of lines that name a backend


class Line(Protocol):
    """What :func:`append` writes: anything of plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement.

    Attributes:
        case, backend, format, activations, tokens, routing: what ran.
        median_us, p25_us, p75_us: time of one call.
        floor_us, share: time below which no kernel can go, and ``floor_us / median_us``.
        error: relative, against the reference that emulates the same activations.
        error_exact: relative, against the reference without activation quantization.
        device, torch, triton, commit, date, command: where, with what, of which source, when (UTC) and how.
    """

    case: str
    backend: str
    format: str
    activations: str
    tokens: int
    routing: str
    median_us: float
    p25_us: float
    p75_us: float
    floor_us: float
    share: float
    error: float
    error_exact: float
    device: str
    torch: str
    triton: str | None
    commit: str
    date: str
    command: str

    @property
    def key(self) -> tuple[str, str, str, str, int, str, str]:
        """Of all records with one key the newest counts."""
        return (self.case, self.backend, self.format, self.activations, self.tokens, self.routing, self.device)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What all records of one run share."""

    device: str
    torch: str
    triton: str | None
    commit: str
    command: str

    @classmethod
    def now(cls, machine: Machine, command: str, commit: str | None = None) -> Stamp:
        """Of this process; the commit, if not given, is the source tree's, or the package's version without git."""
        import torch

        commit = commit or source()
        return cls(machine.device.name, torch.__version__, machine.packages.get("triton"), commit, command)

    def date(self) -> str:
        """Now, in UTC."""
        return utc_now()


def utc_now() -> str:
    """``"2026-01-02T03:04:05Z"``: now, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def source() -> str:
    """What runs: ``"22f841a"``, ``"22f841a-dirty"`` with changes not committed, or ``"0.1.0"``."""
    from polymoe import __version__

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or __version__
    except OSError:  # no git
        return __version__


def check_writable(path: Path) -> None:
    """Raises ArgumentError unless records can be appended to ``path``; makes the file."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ArgumentError("--out", expected="a file to append to", got=str(error)) from error


def append(path: Path, record: Line) -> None:
    """Add one line, in one write: processes that share a file do not mix their lines."""
    line = json.dumps(record.to_dict()) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Record]:
    """Every record of a file, in its order.

    Raises:
        ArgumentError: naming the line that is none.
    """
    names = {f.name for f in fields(Record)}
    return [Record(**values) for values in read_lines(path, names, "a bench record")]


def read_lines(path: Path, names: Iterable[str], expected: str) -> list[Mapping[str, Any]]:
    """Every line of a JSONL file as its values, which must have exactly these names. Backends that were renamed since
    have their new names.

    Raises:
        ArgumentError: naming the line that is none, and what was expected.
    """
    wanted, lines = set(names), []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.keys() != wanted:
            raise ArgumentError(f"{path}, line {number}", expected=expected, got=line[:80])
        named = {name: current_name(str(values[name])) for name in _BACKENDS if name in values}
        lines.append({**values, **named})
    return lines


def newest(records: Iterable[Record]) -> list[Record]:
    """The newest record of each key, the later one where dates are the same."""
    best: dict[tuple[object, ...], Record] = {}
    for record in records:
        if record.key not in best or record.date >= best[record.key].date:
            best[record.key] = record
    return list(best.values())
