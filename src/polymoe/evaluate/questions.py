"""Sets of questions: one JSON object in each line, with ``prompt`` and ``answer``, as ``models/sums-heldout.jsonl``.

For public tasks there is lm-eval, which asks the same server (``docs/evaluation.md``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError

__all__ = ["Question", "read_questions"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        id: a digest of question and answer, the same in every run.
        text: the prompt, as it stands in the file.
        answer: the expected one, without surrounding white space.
    """

    id: str
    text: str
    answer: str


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a ``.jsonl`` file in order.

    Raises:
        ArgumentError: if the file cannot be read, or for a row without the fields; it names the line.
    """
    questions, seen = list[Question](), dict[str, int]()
    for line, row in _rows(path):
        text, answer = str(row.get("prompt") or ""), str(row.get("answer") or "").strip()
        if not text or not answer:
            got, hint = json.dumps(row)[:200], "for public tasks there is lm-eval"
            raise ArgumentError(f"{path}:{line}", expected="prompt and answer", got=got, hint=hint)
        digest = hashlib.sha256(f"{text}\0{answer}".encode()).hexdigest()[:16]
        count = seen[digest] = seen.get(digest, 0) + 1
        questions.append(Question(digest if count == 1 else f"{digest}-{count}", text, answer))
    if not questions:
        raise ArgumentError(str(path), expected="questions", got="none")
    return questions


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
