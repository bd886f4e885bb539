"""Samples of lm-eval: one JSON line for each question, with what each metric makes of the answer.

Format: https://github.com/EleutherAI/lm-evaluation-harness ``EvaluationTracker.save_results_samples``
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError, nearest

__all__ = ["Samples", "read_samples"]


@dataclass(frozen=True, slots=True)
class Samples:
    """The answers of one run to one task.

    Attributes:
        task, metric, filter: as lm-eval names them.
        runs: how many files were read: lm-eval writes one each time that it asks the questions.
        values: of the metric, by question; one from each file that has the question.
    """

    task: str
    metric: str
    filter: str
    runs: int
    values: Mapping[str, Sequence[float]]


def read_samples(path: Path, *, metric: str | None = None, filter: str | None = None) -> Samples:
    """Read a file of samples, or all files of one task in a directory and below it, as repeats of one run.

    Args:
        path: a file that lm-eval wrote with ``--log_samples``, or its ``--output_path``.
        metric, filter: which of several; None for the only one.

    Raises:
        ArgumentError: without samples, for those of several tasks, for lines that are no samples, and for a metric or
            filter that is not there or is not the only one.
    """
    files = sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]
    tasks = sorted({re.sub(r"^samples_|_\d{4}-\d\d-\d\dT[\d.-]+$", "", file.stem) for file in files})
    if len(tasks) != 1:
        got = f"tasks {', '.join(tasks)}" if tasks else "none"
        hint = "name a file of one task" if tasks else "lm_eval writes them with --log_samples --output_path DIRECTORY"
        raise ArgumentError(str(path), expected="samples_*.jsonl of one task", got=got, hint=hint)
    rows = [row for file in files for row in _rows(file)]
    filter = _only("--filter", filter, {row["filter"] for _, row in rows}, path)
    rows = [(where, row) for where, row in rows if row["filter"] == filter]
    metric = _only("--metric", metric, {name for _, row in rows for name in row["metrics"]}, path)
    values: dict[str, list[float]] = {}
    for where, row in rows:
        value = row.get(metric)
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ArgumentError(f"{where}: {metric}", expected="a number from 0 to 1", got=repr(value)[:80])
        # Its place counts too: a set may have a question twice.
        values.setdefault(f"{row['doc_id']} {row['doc_hash']}", []).append(float(value))
    return Samples(tasks[0], metric, filter, len(files), values)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file, with where each stands."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(str(file), expected="samples of lm-eval", got=str(error)) from error
    found = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, found = f"{file}:{number}", True
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ArgumentError(where, expected="a sample of lm-eval", got=str(error)) from error
        if not isinstance(row, dict) or not {"doc_id", "doc_hash", "filter", "metrics"} <= row.keys():
            hint = "lm_eval writes them with --log_samples"
            raise ArgumentError(where, expected="a sample of lm-eval", got=line[:80], hint=hint)
        metrics = row["metrics"]
        if not isinstance(row["filter"], str) or not isinstance(metrics, list) or not all(map(_is_text, metrics)):
            raise ArgumentError(where, expected="names of a filter and of metrics", got=line[:80])
        yield where, row
    if not found:
        raise ArgumentError(str(file), expected="samples of lm-eval", got="an empty file")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _only(option: str, name: str | None, known: set[str], path: Path) -> str:
    if name is None and len(known) == 1:
        return next(iter(known))
    if name is None:
        expected = f"one of those in {path}"
        raise ArgumentError(option, expected=expected, got="none", hint=f"known: {', '.join(sorted(known))}")
    if name not in known:
        raise ArgumentError(option, expected=f"one of those in {path}", got=repr(name), hint=nearest(name, known))
    return name
