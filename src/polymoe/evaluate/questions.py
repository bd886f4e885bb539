"""Sets of questions: their fields, their prompts, and how answers are extracted.

A file has one JSON object in each line. Its fields say of which kind it is:

- ``exact``: ``prompt`` and ``answer``, as ``models/sums-heldout.jsonl``: the whole response is the answer.
- ``gsm8k``: ``question``, and ``answer`` that ends in ``#### 42``, as ``test.jsonl`` of
  https://github.com/openai/grade-school-math: the answer is a number.

For other public tasks there is lm-eval, which asks the same server (``docs/evaluation.md``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError, nearest
from polymoe.evaluate.answers import final_number, number, whole_text

__all__ = ["TASKS", "Question", "Task", "read_questions"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        id: a digest of question and answer, the same in every run.
        text: as it stands in the file.
        answer: the expected one.
    """

    id: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """How questions of one kind are asked and their answers extracted.

    Attributes:
        name: for ``--task``.
        fields: description of the fields, for messages.
        question: the field of the question.
        expected: returns the expected answer from the text of the field ``answer``; empty for another kind.
        instruction: the text after the question in the prompt.
        extract: returns the answer in a response, see :mod:`polymoe.evaluate.answers`.
    """

    name: str
    fields: str
    question: str
    expected: Callable[[str], str]
    instruction: str
    extract: Callable[..., str | None]

    def read(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return question and expected answer of a row; empty if it has none of this kind."""
        text, answer = (str(row.get(name) or "") for name in (self.question, "answer"))
        return text, self.expected(answer)


def _after_mark(answer: str) -> str:
    _, mark, result = answer.rpartition("####")
    return (mark and number(result)) or ""


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("exact", "prompt, answer", "prompt", str.strip, "", whole_text),
        Task(
            "gsm8k",
            "question, and answer with '#### ' before the result",
            "question",
            _after_mark,
            "\n\nThink step by step. Close with a line of the form '#### N', where N is the result as a plain number.",
            final_number,
        ),
    )
}
"""Every kind of question; a file gets the first kind that its first row fits."""


def read_questions(path: Path, *, task: str = "auto") -> tuple[Task, list[Question]]:
    """Read the questions of a ``.jsonl`` file in order, and determine their kind.

    Args:
        path: the file.
        task: a name in :data:`TASKS`, or "auto" to use the fields.

    Raises:
        ArgumentError: if the file cannot be read, or for a row without the fields; it names the line.
    """
    if task != "auto" and task not in TASKS:
        raise ArgumentError("task", expected="a kind of question", got=repr(task), hint=nearest(task, TASKS))
    rows = _rows(path)
    if not rows:
        raise ArgumentError(str(path), expected="questions", got="none")
    kinds = [TASKS[task]] if task != "auto" else [k for k in TASKS.values() if k.question in rows[0][1]]
    if not kinds:
        raise ArgumentError(
            f"{path}:{rows[0][0]}",
            expected="; or ".join(f"{k.fields} ({k.name})" for k in TASKS.values()),
            got=", ".join(map(str, rows[0][1])) or "no fields",
            hint="for other public tasks there is lm-eval",
        )
    kind, questions, seen = kinds[0], list[Question](), dict[str, int]()
    for line, row in rows:
        text, answer = kind.read(row)
        if not text or not answer:
            raise ArgumentError(f"{path}:{line}", expected=f"{kind.fields} ({kind.name})", got=json.dumps(row)[:200])
        digest = hashlib.sha256(f"{text}\0{answer}".encode()).hexdigest()[:16]
        count = seen[digest] = seen.get(digest, 0) + 1
        questions.append(Question(digest if count == 1 else f"{digest}-{count}", text, answer))
    return kind, questions


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return line numbers and rows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(str(path), expected="UTF-8 text", got=str(error)) from error
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ArgumentError(str(path), expected="a .jsonl file", got=error.strerror) from error
    return [(i, _parsed(line, f"{path}:{i}")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ArgumentError(where, expected="a JSON object", got=str(error)) from error
    if not isinstance(value, dict):
        raise ArgumentError(where, expected="a JSON object", got=text[:80])
    return value
