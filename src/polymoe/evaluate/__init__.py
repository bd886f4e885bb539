"""Accuracy of a model behind any OpenAI-compatible server: what ``polymoe eval`` runs.

:func:`evaluate` asks the questions of one file and keeps the answers in another; :func:`score` and :func:`compare` say
what they are worth. :mod:`polymoe.evaluate.harness` leaves tasks to lm-eval instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymoe.errors import ArgumentError
from polymoe.evaluate.questions import TASKS, Question, Task, read_questions
from polymoe.evaluate.records import Record, RecordFile, Settings, read_records
from polymoe.evaluate.scores import Difference, Score, compare, score

if TYPE_CHECKING:
    from polymoe.evaluate.asking import Server

__all__ = [
    "TASKS",
    "Difference",
    "Question",
    "Record",
    "Run",
    "Score",
    "Settings",
    "Task",
    "compare",
    "evaluate",
    "read_questions",
    "read_records",
    "score",
]


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has come to its end.

    Attributes:
        path: the file of its answers.
        settings: what they share.
        score: of all answers in the file; None if there are none.
        failures: a message for each question that got no answer; the next run asks them again.
    """

    path: Path
    settings: Settings
    score: Score | None
    failures: tuple[str, ...]


def evaluate(
    data: str | Path,
    *,
    server: Server,
    model: str | None = None,
    task: str = "auto",
    repeats: int = 1,
    limit: int | None = None,
    endpoint: str = "chat",
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    system: str | None = None,
    extra: Mapping[str, Any] | None = None,
    out: Path | None = None,
    fresh: bool = False,
    on_start: Callable[[Path, int, int], None] = lambda path, done, total: None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Ask a set of questions, and keep every answer as it comes: an interrupted run goes on where it stood.

    Args:
        data: the file of questions, see :mod:`polymoe.evaluate.questions`.
        server: whom to ask.
        model: as the server calls it; None is its only one.
        task: the questions' kind, or "auto".
        repeats: how often each question is asked.
        limit: only the first questions.
        endpoint: "chat", with the server's chat template, or "completions", without.
        temperature, top_p, max_tokens: None leaves them to the server.
        seed: for the options' order and the requests' seeds, see :class:`~polymoe.evaluate.records.Settings`.
        system: a system message; only for "chat".
        extra: further fields of every request, such as ``{"chat_template_kwargs": {...}}``.
        out: the file of answers; None is one in the current directory, named after set, model and settings.
        fresh: start over, replacing what ``out`` holds.
        on_start: called with the file, the number of answers it has, and the number wanted in all.
        on_record: called with every new answer.

    Raises:
        ArgumentError: for questions or records that cannot be read, or an argument out of range.
        ServerError: for a server that cannot be reached, refuses, or fails again and again.
        KeyboardInterrupt: when interrupted; answers so far are in the file.
    """
    from polymoe.evaluate.asking import ask_all

    if endpoint not in ("chat", "completions") or (endpoint != "chat" and system is not None):
        raise ArgumentError(
            "endpoint", expected="chat, or completions without a system message", got=f"{endpoint}, system={system!r}"
        )
    kind, questions = read_questions(Path(data), task=task)
    settings = Settings(
        data=Path(data).name,
        data_sha256=hashlib.sha256(Path(data).read_bytes()).hexdigest(),
        task=kind.name,
        instruction=kind.instruction,
        model=server.model(model),
        endpoint=endpoint,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        system=system,
        extra=json.dumps(dict(extra or {}), sort_keys=True),
    )
    path = out or Path(_file_name(settings))
    wanted = [(repeat, question) for repeat in range(repeats) for question in questions[:limit]]
    with RecordFile(path, settings, fresh=fresh) as file:
        pending = [(repeat, question) for repeat, question in wanted if (question.id, repeat) not in file.records]
        on_start(path, len(wanted) - len(pending), len(wanted))

        def keep(record: Record) -> None:
            file.append(record)
            on_record(record)

        failures = asyncio.run(ask_all(server, settings, kind, pending, keep)) if pending else []
        records = list(file.records.values())
    return Run(path, settings, score(records) if records else None, tuple(failures))


def _file_name(settings: Settings) -> str:
    """``eval-SET-MODEL-1a2b3c4d.jsonl``: other settings, another file."""
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:8]
    names = (re.sub(r"[^\w.-]+", "-", name) for name in (Path(settings.data).stem, settings.model))
    return "-".join(["eval", *names, digest]) + ".jsonl"
