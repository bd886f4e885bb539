"""Samples of lm-eval are read, or refused with where it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polymoe.errors import ArgumentError
from polymoe.evaluate import read_samples

DATE = "2026-11-26T16-40-45.987883"


def sample(number: int, value: Any = 1.0, **other: Any) -> dict[str, Any]:
    """A line, as lm-eval 0.4.13 writes it."""
    about = {"doc_id": number, "doc": {"prompt": "1+1="}, "target": "2", "resps": [["2"]], "doc_hash": f"{number:064x}"}
    return {**about, "filter": "none", "metrics": ["exact_match"], "exact_match": value, **other}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_files_of_a_directory_are_repeats(tmp_path: Path) -> None:
    for date, values in ((DATE, (1, 0)), (DATE.replace("40", "50"), (1, 1))):
        write(tmp_path / "model" / f"samples_sums_{date}.jsonl", *(sample(i, v) for i, v in enumerate(values)))
    found = read_samples(tmp_path)
    assert (found.task, found.metric, found.filter, found.runs) == ("sums", "exact_match", "none", 2)
    assert list(found.values.values()) == [[1, 1], [0, 1]]
    alone = read_samples(next(iter(sorted(tmp_path.rglob("*.jsonl")))))
    assert (alone.runs, list(alone.values.values())) == (1, [[1], [0]])


def test_a_question_that_a_set_has_twice_counts_twice(tmp_path: Path) -> None:
    file = write(tmp_path / "samples_sums.jsonl", sample(0, doc_hash="same"), sample(1, doc_hash="same"))
    assert len(read_samples(file).values) == 2


def test_metric_and_filter_are_chosen(tmp_path: Path) -> None:
    metrics = ["exact_match", "f1"]
    rows = [
        sample(0, value, filter=name, metrics=metrics, f1=0.5) for name, value in (("strict-match", 0), ("flexible", 1))
    ]
    file = write(tmp_path / "samples_gsm8k.jsonl", *rows)
    found = read_samples(file, metric="exact_match", filter="flexible")
    assert list(found.values.values()) == [[1]]
    with pytest.raises(ArgumentError, match=r"--filter: expected one of .*\n.*known: flexible, strict-match"):
        read_samples(file)
    with pytest.raises(ArgumentError, match="--metric: expected one of"):
        read_samples(file, filter="flexible")
    with pytest.raises(ArgumentError, match="did you mean 'flexible'"):
        read_samples(file, filter="flexibel")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected samples of lm-eval, got an empty file"),
        ("{", r"samples_a.jsonl:1: expected a sample of lm-eval"),
        ("[1]\n", r"samples_a.jsonl:1: expected a sample of lm-eval, got \[1\]"),
        ('{"results": {}}\n', "--log_samples"),
        (json.dumps(sample(0)) + "\n" + json.dumps(sample(1, "yes")), "2: exact_match: expected a number from 0 to 1"),
        (json.dumps(sample(0, 7)), "expected a number from 0 to 1, got 7"),
        (json.dumps(sample(0, metrics="exact_match")), "expected names of a filter and of metrics"),
        (json.dumps(sample(0, filter=["none"])), "expected names of a filter and of metrics"),
        (b"\xff", "samples_a.jsonl: expected samples of lm-eval"),
    ],
)
def test_what_is_no_samples(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "samples_a.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArgumentError, match=message):
        read_samples(file)


def test_a_directory_without_samples_or_with_several_tasks(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"got none\n.*--output_path"):
        read_samples(tmp_path)
    with pytest.raises(ArgumentError, match="absent: expected samples of lm-eval"):
        read_samples(tmp_path / "absent")
    for task in ("gsm8k", "ifeval"):
        write(tmp_path / f"samples_{task}_{DATE}.jsonl", sample(0))
    with pytest.raises(ArgumentError, match="got tasks gsm8k, ifeval"):
        read_samples(tmp_path)
