"""Sets of questions, and files that are something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polymoe.errors import ArgumentError
from polymoe.evaluate.questions import read_questions

MODELS = Path(__file__).parents[2] / "models"


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_our_own_set() -> None:
    questions = read_questions(MODELS / "sums-heldout.jsonl")
    assert (len(questions), len({q.id for q in questions})) == (1000, 1000)
    assert (questions[0].text, questions[0].answer) == ("498-971=", "-473")


def test_ids_depend_on_the_content_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "a", "answer": "1"}]
    first = [q.id for q in read_questions(jsonl(tmp_path / "x.jsonl", *rows))]
    again = [q.id for q in read_questions(jsonl(tmp_path / "y.jsonl", *rows[::-1]))]
    assert first[2] == f"{first[0]}-2"
    assert sorted(first) == sorted(again)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "expected questions, got none"),
        ("\n\n", "expected questions, got none"),
        ("{", "set.jsonl:1: expected a JSON object"),
        ("[1]", "set.jsonl:1: expected a JSON object, got [1]"),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "a"}', "set.jsonl:3: expected prompt and answer"),
        ('{"question": "a", "answer": "#### 1"}', "for public tasks there is lm-eval"),
        ("{}", "expected prompt and answer, got {}"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(ArgumentError) as refused:
        read_questions(path)
    assert says in str(refused.value)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="No such file"):
        read_questions(tmp_path / "absent.jsonl")
    with pytest.raises(ArgumentError, match="directory"):
        read_questions(tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="UTF-8"):
        read_questions(tmp_path / "binary.jsonl")
