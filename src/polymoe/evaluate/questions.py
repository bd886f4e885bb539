"""Published sets of questions: their fields, their prompts, and how answers are extracted.

The fields of each kind of file:

- ``exact``: JSONL with ``prompt`` and ``answer``, as ``models/sums-heldout.jsonl``: the whole response is the answer.
- ``gsm8k``: ``test.jsonl`` of https://github.com/openai/grade-school-math: ``question``, and ``answer`` that ends in
  ``#### 42``.
- ``aime``: JSONL or CSV with ``problem`` or ``question``, and ``answer`` or a ``solution`` that boxes it; their first
  letter may be a capital. On https://huggingface.co/datasets: HuggingFaceH4/aime_2024, math-ai/aime24 and aime25,
  opencompass/AIME2025, Maxwell-Jia/AIME_2024.
- ``gpqa``: ``gpqa_diamond.csv``, ``gpqa_main.csv`` or ``gpqa_extended.csv`` of https://github.com/idavidrein/gpqa:
  ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` to ``3``.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError, nearest
from polymoe.evaluate.answers import choice_letter, final_number, number, whole_text

__all__ = ["TASKS", "Question", "Task", "read_questions"]

_LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        id: a digest of question and answer, the same in every run.
        text: the published text.
        answer: the expected answer; empty for a choice, where it depends on the order of the options.
        options: of a multiple-choice question, the right one first; else empty.
    """

    id: str
    text: str
    answer: str
    options: tuple[str, ...] = ()

    def ordered(self, seed: int, repeat: int) -> tuple[int, ...]:
        """Return the order of options in one repeat, the same on every machine.

        Options are sorted by the SHA-256 of seed, repeat, question and option, independent of library versions.
        """

        def key(option: int) -> bytes:
            return hashlib.sha256(f"{seed}/{repeat}/{self.id}/{option}".encode()).digest()

        return tuple(sorted(range(len(self.options)), key=key))


@dataclass(frozen=True, slots=True)
class Task:
    """How questions of one kind are asked and their answers extracted.

    Attributes:
        name: for ``--task``.
        fields: description of the fields, for messages.
        fits: whether a row is of this kind.
        read: returns question, expected answer and options of a row.
        instruction: the text after the question in the prompt.
        extract: returns the answer in a response, see :mod:`polymoe.evaluate.answers`.
    """

    name: str
    fields: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], tuple[str, str, tuple[str, ...]]]
    instruction: str
    extract: Callable[..., str | None]

    def ask(self, question: Question, *, seed: int = 0, repeat: int = 0) -> tuple[str, str]:
        """Return the prompt and the expected answer of one repeat."""
        if not question.options:
            return question.text + self.instruction, question.answer
        order = question.ordered(seed, repeat)
        lines = [f"{letter}) {question.options[i]}" for letter, i in zip(_LETTERS, order, strict=True)]
        return "\n".join([question.text, "", *lines]) + self.instruction, _LETTERS[order.index(0)]


def _first(row: Mapping[str, Any], *names: str) -> str:
    """Return the first of these fields that the row has, in lower case or capitalized; "" if none."""
    for name in names:
        for spelling in (name, name.capitalize()):
            value = row.get(spelling)
            if isinstance(value, str | int) and str(value).strip():
                return str(value).strip()
    return ""


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    _, _, answer = str(row["answer"]).rpartition("####")
    return str(row["question"]), number(answer) or "", ()


def _aime(row: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    found = number(_first(row, "answer")) or final_number(_first(row, "solution"), finished=False)
    return _first(row, "problem", "question"), found or "", ()


def _gpqa(row: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    options = [str(row[name]).strip() for name in _GPQA[1:]]
    return str(row["Question"]).strip(), "", tuple(options)


_GPQA = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            "gpqa",
            ", ".join(_GPQA),
            lambda row: all(isinstance(row.get(name), str) and row[name].strip() for name in _GPQA),
            _gpqa,
            "\n\nThink step by step. Close with a line of the form 'Answer: X', where X is A, B, C or D.",
            functools.partial(choice_letter, letters=_LETTERS),
        ),
        Task(
            "gsm8k",
            "question, and answer with '#### ' before the result",
            lambda row: bool(_first(row, "question")) and "####" in _first(row, "answer"),
            _gsm8k,
            "\n\nThink step by step. Close with a line of the form '#### N', where N is the result as a plain number.",
            final_number,
        ),
        Task(
            "exact",
            "prompt, answer",
            lambda row: bool(_first(row, "prompt") and _first(row, "answer")),
            lambda row: (str(row["prompt"]), str(row["answer"]).strip(), ()),
            "",
            whole_text,
        ),
        Task(
            "aime",
            "problem or question, and answer or solution",
            lambda row: bool(_first(row, "problem", "question") and _first(row, "answer", "solution")),
            _aime,
            "\n\nThink step by step. The result is an integer from 0 to 999; close with it as \\boxed{N}.",
            final_number,
        ),
    )
}
"""Every kind of question, the most specific first: a file gets the first kind that its rows fit."""


def read_questions(path: Path, *, task: str = "auto") -> tuple[Task, list[Question]]:
    """Read the questions of a ``.jsonl``, ``.json`` (a list) or ``.csv`` file in order, and determine their kind.

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
    kinds = [TASKS[task]] if task != "auto" else [k for k in TASKS.values() if k.fits(rows[0][1])]
    if not kinds:
        raise ArgumentError(
            f"{path}:{rows[0][0]}",
            expected="; or ".join(f"{k.fields} ({k.name})" for k in TASKS.values()),
            got=", ".join(map(str, rows[0][1])) or "no fields",
        )
    kind = kinds[0]
    questions: list[Question] = []
    seen: dict[str, int] = {}
    for line, row in rows:
        text, answer, options = kind.read(row) if kind.fits(row) else ("", "", ())
        if not text or not (answer or options):
            raise ArgumentError(
                f"{path}:{line}", expected=f"{kind.fields} ({kind.name})", got=json.dumps(row, default=str)[:200]
            )
        digest = hashlib.sha256("\0".join((text, answer, *options)).encode()).hexdigest()[:16]
        count = seen[digest] = seen.get(digest, 0) + 1
        questions.append(Question(digest if count == 1 else f"{digest}-{count}", text, answer, options))
    return kind, questions


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return line numbers and rows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(str(path), expected="UTF-8 text", got=str(error)) from error
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ArgumentError(str(path), expected="a .jsonl, .json or .csv file", got=error.strerror) from error
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""))
        try:
            return [(reader.line_num, dict(row)) for row in reader]
        except csv.Error as error:
            raise ArgumentError(f"{path}:{reader.line_num}", expected="CSV", got=str(error)) from error
    if path.suffix.lower() == ".json":
        return list(enumerate(_parsed(text, str(path), list), 1))
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [(i, _parsed(line, f"{path}:{i}", dict)) for i, line in lines]


def _parsed(text: str, where: str, kind: type) -> Any:
    names = {dict: "a JSON object", list: "a list of JSON objects"}
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ArgumentError(where, expected=names[kind], got=str(error)) from error
    if not isinstance(value, kind) or (kind is list and not all(isinstance(row, dict) for row in value)):
        raise ArgumentError(where, expected=names[kind], got=text[:80])
    return value
