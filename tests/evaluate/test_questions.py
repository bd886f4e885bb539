"""Sets of questions as they are published, and files that are something else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polymoe.errors import ArgumentError
from polymoe.evaluate.questions import TASKS, Question, read_questions
from support.evaluation import GPQA, gpqa

MODELS = Path(__file__).parents[2] / "models"


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_our_own_set() -> None:
    task, questions = read_questions(MODELS / "sums-heldout.jsonl")
    assert (task.name, len(questions), len({q.id for q in questions})) == ("exact", 1000, 1000)
    assert task.ask(questions[0], seed=5, repeat=7) == ("498-971=", "-473")


def test_gsm8k(tmp_path: Path) -> None:
    row = {"question": "How many eggs?", "answer": "She sells 16 - 3 = <<16-3=13>>13 eggs.\n#### 1,013"}
    task, [question] = read_questions(jsonl(tmp_path / "test.jsonl", row))
    prompt, expected = task.ask(question)
    assert (task.name, expected) == ("gsm8k", "1013")
    assert prompt.startswith("How many eggs?\n\n")
    assert "####" in prompt
    assert task.extract("...\n#### 1013.") == expected


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        # HuggingFaceH4/aime_2024
        ({"id": 60, "problem": "Find x.", "solution": "long", "answer": "204", "url": "u", "year": "2024"}, "204"),
        # math-ai/aime24: no field for the answer
        ({"id": 60, "problem": "Find x.", "solution": "So $x = \\boxed{033}$.", "url": "u"}, "33"),
        # math-ai/aime25
        ({"problem": "Find x.", "answer": "336^\\circ", "id": "15"}, "336"),
        # opencompass/AIME2025
        ({"question": "Find x.", "answer": "70"}, "70"),
        # Maxwell-Jia/AIME_2024
        ({"ID": "2024-II-4", "Problem": "Find x.", "Solution": "long", "Answer": 33}, "33"),
    ],
)
def test_aime(tmp_path: Path, row: dict[str, Any], answer: str) -> None:
    task, [question] = read_questions(jsonl(tmp_path / "aime.jsonl", row))
    prompt, expected = task.ask(question)
    assert (task.name, expected) == ("aime", answer)
    assert prompt.startswith("Find x.\n\n")
    assert "\\boxed{N}" in prompt


def test_aime_as_csv_and_as_one_json_list(tmp_path: Path) -> None:
    table = tmp_path / "AIME_Dataset_1983_2024.csv"
    table.write_text('ID,Year,Problem Number,Question,Answer,Part\n1983-1,1983,1,"Let $x,y$\nbe.",60,\n')
    assert read_questions(table)[1][0].text == "Let $x,y$\nbe."
    whole = tmp_path / "aime.json"
    whole.write_text(json.dumps([{"problem": "a", "answer": "1"}, {"problem": "b", "answer": "2"}]))
    assert [q.answer for q in read_questions(whole)[1]] == ["1", "2"]


def test_gpqa(tmp_path: Path) -> None:
    task, [question] = read_questions(gpqa(tmp_path / "gpqa_diamond.csv", GPQA))
    assert task.name == "gpqa"
    assert question.options == ("a ripe tomato", "snow", 'a "white" wall, newly painted', "coal")
    prompt, letter = task.ask(question, seed=3, repeat=1)
    assert prompt.startswith("Which of these is red,\nseen by day?\n\nA) ")
    assert f"\n{letter}) a ripe tomato\n" in prompt
    assert task.extract(f"Answer: {letter}") == letter


def test_options_are_shuffled_evenly_and_the_same_each_time() -> None:
    options = ("right", "1", "2", "3")
    questions = [Question(f"question {i}", "?", "", options) for i in range(1000)]
    letters = Counter(TASKS["gpqa"].ask(question)[1] for question in questions)
    assert all(200 < letters[letter] < 300 for letter in "ABCD")
    orders = {(seed, repeat): questions[0].ordered(seed, repeat) for seed in range(5) for repeat in range(5)}
    assert len(set(orders.values())) > 10
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders.values())
    assert orders == {key: questions[0].ordered(*key) for key in orders}
    assert questions[0].ordered(0, 0) == (0, 1, 3, 2)  # a known value: no library may change it


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
        ('{"question": "a", "answer": "no mark"}', "set.jsonl:1: expected problem or question"),
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
    (tmp_path / "wide.csv").write_text("Question\n" + "x" * 200_000)
    with pytest.raises(ArgumentError, match=r"wide\.csv:[12]: expected CSV, got field larger"):
        read_questions(tmp_path / "wide.csv")
    with pytest.raises(ArgumentError, match="did you mean 'gsm8k'"):
        read_questions(MODELS / "sums-heldout.jsonl", task="gms8k")
    with pytest.raises(ArgumentError, match=r":1: expected Question, Correct Answer"):
        read_questions(MODELS / "sums-heldout.jsonl", task="gpqa")
