"""``polymoe eval compare``: what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]


def samples(path: Path, right: str) -> Path:
    """One character a question: 1 is right."""
    rows = (
        {"doc_id": i, "doc_hash": f"{i}", "filter": "none", "metrics": ["exact_match"], "exact_match": float(value)}
        for i, value in enumerate(right)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return samples(tmp_path / "samples_a.jsonl", "1111011111"), samples(tmp_path / "samples_b.jsonl", "11110000")


def test_a_table(cli: Cli, runs: tuple[Path, Path]) -> None:
    code, out, err = cli("eval", "compare", *runs)
    assert code == 0
    for text in (
        "87.50 % ± 12.50",
        "50.00 % ± 18.90",
        "+37.50 points",
        "95 % interval -5.77 to +80.77",
        "on 3, B on 0",
    ):
        assert text in out, out
    assert err.splitlines() == [
        "note: the runs differ in their task: a, b",
        "note: 2 of 10 questions were answered in one run only: left out",
    ]


def test_json(cli: Cli, runs: tuple[Path, Path]) -> None:
    code, out, _ = cli("eval", "compare", *runs, "--json", "--metric", "exact_match")
    found = json.loads(out)
    assert code == 0
    assert (found["questions"], found["a"], found["b"], found["better"], found["worse"]) == (8, 0.875, 0.5, 3, 0)
    assert (found["a_runs"], found["b_runs"], len(found["notes"])) == (1, 1, 2)


def test_runs_without_a_question_in_common(cli: Cli, runs: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "samples_c.jsonl"
    other.write_text(runs[0].read_text().replace('"doc_hash": "', '"doc_hash": "x'))
    code, _, err = cli("eval", "compare", runs[0], other)
    assert code == 2
    assert "compare: expected two runs over the same questions, got no question in common" in err


def test_compare_needs_two_runs(cli: Cli) -> None:
    code, _, err = cli("eval", "compare", "one")
    assert code == 2
    assert "Usage: polymoe eval compare" in err
