"""Accuracy of a model behind any OpenAI-compatible server: what ``polymoe eval`` runs.

:func:`evaluate` asks the questions of one file and stores the answers in another; :func:`score` and :func:`compare`
compute the statistics.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polymoe.common.openai_client import Server
from polymoe.errors import ArgumentError
from polymoe.evaluate.questions import Question, read_questions
from polymoe.evaluate.records import AnswerRecord, RecordFile, Settings, read_records
from polymoe.evaluate.scores import Difference, Score, compare, score

__all__ = [
    "AnswerRecord",
    "Difference",
    "Question",
    "Run",
    "Score",
    "Server",
    "Settings",
    "compare",
    "evaluate",
    "read_questions",
    "read_records",
    "score",
]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.

    Attributes:
        path: the file of its answers.
        settings: the settings of all answers.
        score: of all answers in the file; None for an empty file.
        failures: a message for each question without an answer; the next run asks them again.
        malformed: a message for each answer that is invalid because the reply is not a response of the API.
    """

    path: Path
    settings: Settings
    score: Score | None
    failures: tuple[str, ...]
    malformed: tuple[str, ...] = ()


def evaluate(
    data: str | Path,
    *,
    server: Server,
    model: str | None = None,
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
    on_record: Callable[[AnswerRecord], None] = lambda record: None,
) -> Run:
    """Ask a set of questions and store every answer when it arrives, so that an interrupted run can continue.

    Args:
        data: the file of questions, see :mod:`polymoe.evaluate.questions`.
        server: the server to ask.
        model: its name on the server; None for the server's only model.
        repeats: how often each question is asked.
        limit: only the first questions.
        endpoint: "chat", which uses the server's chat template, or "completions", which does not.
        temperature, top_p, max_tokens: None for the server's defaults.
        seed: for the seeds of requests, see :class:`~polymoe.evaluate.records.Settings`.
        system: a system message; only for "chat".
        extra: further fields of every request, such as ``{"chat_template_kwargs": {...}}``.
        out: the file of answers; None for a file in the current directory, named after set, model and settings.
        fresh: start over and replace ``out``.
        on_start: called with the file, the number of its answers, and the total number of answers.
        on_record: called with every new answer.

    Raises:
        ArgumentError: if questions or records cannot be read, or for an argument out of range.
        ServerError: if the server cannot be reached, refuses, or fails repeatedly.
        KeyboardInterrupt: when interrupted; answers so far are in the file.
    """
    from polymoe.evaluate.asking import ask_all

    if endpoint not in ("chat", "completions") or (endpoint != "chat" and system is not None):
        raise ArgumentError(
            "endpoint", expected="chat, or completions without a system message", got=f"{endpoint}, system={system!r}"
        )
    questions = read_questions(Path(data))
    settings = Settings(
        data=Path(data).name,
        data_sha256=hashlib.sha256(Path(data).read_bytes()).hexdigest(),
        model=server.model(model).name,
        endpoint=endpoint,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        system=system,
        extra=json.dumps(dict(extra or {}), sort_keys=True),
    )
    path = out or Path(_file_name(settings))
    asked = [(repeat, question) for repeat in range(repeats) for question in questions[:limit]]
    with RecordFile(path, settings, fresh=fresh) as file:
        pending = [(repeat, question) for repeat, question in asked if (question.id, repeat) not in file.records]
        on_start(path, len(asked) - len(pending), len(asked))

        def keep(record: AnswerRecord) -> None:
            file.append(record)
            on_record(record)

        failures = asyncio.run(ask_all(server, settings, pending, keep)) if pending else []
        records = list(file.records.values())
    malformed = tuple(f"question {record.id}: {record.malformed}" for record in records if record.malformed)
    return Run(path, settings, score(records) if records else None, tuple(failures), malformed)


def _file_name(settings: Settings) -> str:
    """Return ``eval-SET-MODEL-1a2b3c4d.jsonl``; other settings give another name."""
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:8]
    names = (re.sub(r"[^\w.-]+", "-", name) for name in (Path(settings.data).stem, settings.model))
    return "-".join(["eval", *names, digest]) + ".jsonl"
