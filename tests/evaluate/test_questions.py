"""Sets of questions as they are published, and files that are something else."""

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
    task, questions = read_questions(MODELS / "sums-heldout.jsonl")
    assert (task.name, len(questions), len({q.id for q in questions})) == ("exact", 1000, 1000)
    assert (questions[0].text + task.instruction, questions[0].answer) == ("498-971=", "-473")


def test_gsm8k(tmp_path: Path) -> None:
    row = {"question": "How many eggs?", "answer": "She sells 16 - 3 = <<16-3=13>>13 eggs.\n#### 1,013"}
    task, [question] = read_questions(jsonl(tmp_path / "test.jsonl", row))
    assert (task.name, question.text, question.answer) == ("gsm8k", "How many eggs?", "1013")
    assert "####" in task.instruction
    assert task.extract("...\n#### 1013.") == question.answer


def test_ids_depend_on_the_content_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "a", "answer": "1"}]
    first = [q.id for q in read_questions(jsonl(tmp_path / "x.jsonl", *rows))[1]]
    again = [q.id for q in read_questions(jsonl(tmp_path / "y.jsonl", *rows[::-1]))[1]]
    assert first[2] == f"{first[0]}-2"
    assert sorted(first) == sorted(again)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "expected questions, got none"),
        ("\n\n", "expected questions, got none"),
        ("{", "set.jsonl:1: expected a JSON object"),
        ("[1]", "set.jsonl:1: expected a JSON object, got [1]"),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "a"}', "set.jsonl:3: expected prompt, answer (exact)"),
        ('{"text": "a", "label": 1}', "got text, label"),
        ("{}", "got no fields"),
        ('{"question": "a", "answer": "no mark"}', "set.jsonl:1: expected question, and answer with"),
        ('{"question": "a", "answer": "#### none"}', "set.jsonl:1: expected question, and answer with"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(ArgumentError) as refused:
        read_questions(path)
    assert says in str(refused.value)


def test_paths_and_kinds_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="No such file"):
        read_questions(tmp_path / "absent.jsonl")
    with pytest.raises(ArgumentError, match="directory"):
        read_questions(tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="UTF-8"):
        read_questions(tmp_path / "binary.jsonl")
    with pytest.raises(ArgumentError, match="did you mean 'gsm8k'"):
        read_questions(MODELS / "sums-heldout.jsonl", task="gms8k")
    with pytest.raises(ArgumentError, match=r":1: expected question, and answer"):
        read_questions(MODELS / "sums-heldout.jsonl", task="gsm8k")
