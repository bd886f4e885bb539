"""Answers on disk: a JSONL file with the settings and one line for each answer, so that a run can be continued.

The first line is ``{"settings": {...}, "polymoe": "0.1.0"}``, every other line a :class:`AnswerRecord`. Each line is
appended whole or not at all. Should a crash leave an incomplete last line, it is dropped when the run continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polymoe.common.atomic import append_whole, locked, open_to_append
from polymoe.common.json_input import parse_json, read_fields
from polymoe.errors import ArgumentError

__all__ = ["AnswerRecord", "RecordFile", "Settings", "read_records"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that all answers of one run share. They identify the run.

    Attributes:
        data, data_sha256: name of the set's file, and digest of its content.
        model: its name on the server.
        endpoint: "chat" or "completions".
        temperature, top_p, max_tokens: as sent; None is not sent and leaves the choice to the server.
        seed: if given, each request carries a seed derived from it, question and repeat.
        system: the system message, or None.
        extra: further fields of each request, as JSON.
    """

    data: str
    data_sha256: str
    model: str
    endpoint: str = "chat"
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    system: str | None = None
    extra: str = "{}"

    def differences(self, other: Settings) -> list[str]:
        """Return ``"temperature: 0.0, not None"`` for every setting in which ``other`` differs."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {theirs[name]!r}, not {mine[name]!r}" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer.

    Attributes:
        id, repeat: the question, and the number of its repetition, from 0.
        expected, answer: without surrounding white space; ``answer`` is None if the text has nothing but reasoning or
            the prompt was too long.
        correct: whether they are equal.
        text: the whole response, without reasoning that the server sends separately.
        finish_reason: from the server; "length" for a truncated text.
        prompt_tokens, completion_tokens: as counted by the server, or None.
        latency_us: from sending the request to the complete response, without earlier retries.
        ended_us: when the response arrived, in microseconds since 1970.
        retries: failed requests before it.
        malformed: why the reply is not a response of the API, or None. The answer is then None.
    """

    id: str
    repeat: int
    expected: str
    answer: str | None
    correct: bool
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_us: int
    ended_us: int
    retries: int = 0
    malformed: str | None = None


class RecordFile:
    """The answers of one run, in memory and in a locked file; use it in a ``with`` block.

    Args:
        path: created if missing, with its directories.
        settings: the settings of this run.
        fresh: start over and replace the file.

    Raises:
        ArgumentError: if the file has other settings, is not a file of records, or is in use.
    """

    def __init__(self, path: Path, settings: Settings, *, fresh: bool = False) -> None:
        self.path = path
        self.records: dict[tuple[str, int], AnswerRecord] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            self._fd = open_to_append(path)
            held.callback(os.close, self._fd)
            self._lock(held)
            self._resume(settings, fresh)
            self._held = held.pop_all()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def append(self, record: AnswerRecord) -> None:
        """Add an answer in memory and append it to the file."""
        self._write(asdict(record))
        self.records[record.id, record.repeat] = record

    def _lock(self, held: contextlib.ExitStack) -> None:
        try:
            held.enter_context(locked(self.path, self._fd, wait=False))
        except BlockingIOError as error:
            raise ArgumentError(
                str(self.path),
                expected="a file that no other run is writing",
                got="one in use",
                hint="choose another --out",
            ) from error

    def _resume(self, settings: Settings, fresh: bool) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ArgumentError(str(self.path), expected="a file of records, or a new file", got="a pipe or a device")
        content = self.path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if content and not content.startswith(b'{"settings"'):
            raise ArgumentError(str(self.path), expected="a file of records, or a new file", got="another file")
        if fresh or complete == 0:
            os.ftruncate(self._fd, 0)
            from polymoe import __version__

            self._write({"settings": asdict(settings), "polymoe": __version__})
            return
        found, records = read_records(self.path)
        if found != settings:
            raise ArgumentError(
                str(self.path),
                expected="records of the same settings",
                got="others: " + "; ".join(settings.differences(found)),
                hint="choose another --out, or start this one over with --fresh",
            )
        os.ftruncate(self._fd, complete)
        self.records = {(record.id, record.repeat): record for record in records}

    def _write(self, value: Mapping[str, Any]) -> None:
        line = (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        append_whole(self._fd, line)


def read_records(path: Path) -> tuple[Settings, list[AnswerRecord]]:
    """Read settings and answers of a run, finished or not; of duplicate answers, the first counts.

    Raises:
        ArgumentError: if the file does not exist or contains anything else.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ArgumentError(str(path), expected="a file of records", got=error.strerror) from error
    records: dict[tuple[str, int], AnswerRecord] = {}
    settings = None
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json(line)
            if settings is None:
                settings = read_fields(Settings, value["settings"])
            else:
                record = read_fields(AnswerRecord, value)
                records.setdefault((record.id, record.repeat), record)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"{path}:{number}",
                expected="a record of polymoe eval" if number > 1 else "the settings of a run of polymoe eval",
                got=f"{line[:80].decode(errors='replace')}: {error}",
            ) from error
    if settings is None:
        raise ArgumentError(str(path), expected="the settings of a run of polymoe eval", got="an empty file")
    return settings, list(records.values())
