"""Records: one JSON line for each measurement, with everything needed to repeat it."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polymoe.common.atomic import append_line, is_cut_short
from polymoe.common.json_input import parse_json, read_fields
from polymoe.errors import ArgumentError
from polymoe.machine import Machine

if TYPE_CHECKING:
    from polymoe.bench.timing import Timing


_T = TypeVar("_T")
_BACKENDS = {"backend", "implementation"}  # fields of lines that name a backend
_RENAMED = {"hopper": "cuda"}
"""Backends that had another name when records were made, by that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement.

    Attributes:
        case, backend, format, activations, tokens, routing: what was measured.
        median_us, p25_us, p75_us: time of one call, in microseconds.
        floor_us, share: the least time the GPU could take, and ``floor_us / median_us``.
        error: relative, against the reference that emulates the same activations.
        error_exact: relative, against the reference without activation quantization.
        device, torch, triton, commit, date, command: GPU, versions, source, time (UTC) and command line.
        family, config: kernel family and configuration of a backend.
        peer: name of the peer that was timed, whose ``backend`` is ``peer:NAME``; None for a backend.
        version: of the peer's package, or of the package whose kernels the backend runs.
        bandwidth_tb_s: the memory bandwidth that ``floor_us`` takes; None in records of before it was kept.
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
    family: str | None = None
    config: str | None = None
    peer: str | None = None
    version: str | None = None
    bandwidth_tb_s: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str, int, str, str]:
        """Identifies a measurement; the newest record of a key counts."""
        return (self.case, self.backend, self.format, self.activations, self.tokens, self.routing, self.device)

    @classmethod
    def of(cls, timing: Timing, floor_us: float, stamp: Stamp, machine: Machine, **fields: Any) -> Record:
        """Create one from times, the floor beside them and what the run's records share; ``fields`` are the others."""
        return cls(
            median_us=round(timing.median_us, 2),
            p25_us=round(timing.p25_us, 2),
            p75_us=round(timing.p75_us, 2),
            floor_us=round(floor_us, 2),
            share=round(floor_us / timing.median_us, 4),
            bandwidth_tb_s=machine.device.bandwidth / 1e12,
            **stamp.fields(),
            **fields,
        )


@dataclass(frozen=True, slots=True)
class Stamp:
    """The fields that all records of one run share."""

    device: str
    torch: str
    triton: str | None
    commit: str
    command: str

    @classmethod
    def now(cls, machine: Machine, command: str, commit: str | None = None) -> Stamp:
        """Describe this process. The commit defaults to that of the source tree, without git to the package version."""
        import torch

        commit = commit or source()
        return cls(machine.device.name, torch.__version__, machine.packages.get("triton"), commit, command)

    def fields(self) -> dict[str, Any]:
        """What a record has of it, with the current time in UTC as ``date``."""
        return {**asdict(self), "date": utc_now()}


def utc_now() -> str:
    """The current time in UTC: ``"2026-01-02T03:04:05Z"``."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def source() -> str:
    """The running source: ``"22f841a"``, ``"22f841a-dirty"`` with uncommitted changes, or ``"0.1.0"``."""
    from polymoe import __version__

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or __version__
    except OSError:  # no git
        return __version__


def check_writable(path: Path) -> None:
    """Raise ArgumentError unless records can be appended to ``path``; creates the file."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ArgumentError("out", expected="a file to append to", got=str(error)) from error


def append(path: Path, record: Any) -> None:
    """Append a dataclass as one line of JSON, whole or not at all; processes that share a file do not mix their lines.

    Raises:
        OSError: if the whole line cannot be written.
    """
    append_line(path, json.dumps(asdict(record)))


def read(path: Path) -> list[Record]:
    """Return every record of a file, in order.

    Raises:
        ArgumentError: for a line that is not a record.
    """
    return read_lines(path, partial(read_fields, Record), "a bench record")


def read_lines(path: Path, build: Callable[[dict[str, Any]], _T], expected: str) -> list[_T]:
    """Return what ``build`` makes of the object in each line of a JSONL file. Renamed backends get their new names.

    A last line that is cut short, as by a writer that was killed, is left out.

    Raises:
        ArgumentError: for a line that is not an object, or from which ``build`` makes nothing; it names the line.
        OSError: if the file cannot be read.
    """
    found = []
    *lines, last = path.read_bytes().split(b"\n")
    if last and not is_cut_short(last):
        lines.append(last)
    for number, line in enumerate(lines, 1):
        try:
            values = parse_json(line)
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            for name in _BACKENDS & values.keys():
                values[name] = "+".join(_RENAMED.get(old, old) for old in str(values[name]).split("+"))
            found.append(build(values))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            got = f"{line[:80].decode(errors='replace')}: {error}"
            raise ArgumentError(f"{path}, line {number}", expected=expected, got=got) from error
    return found
