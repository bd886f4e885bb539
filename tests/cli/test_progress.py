"""Progress without a terminal is lines with what is left; tables follow COLUMNS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polymoe.cli import progress
from polymoe.cli.output import print_table
from polymoe.cli.progress import Progress

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("tune", 4) as bar:
        bar.update("packing")
        bar.update("too soon for another line")
        for seconds in (1, 1, 2):
            now[0] += seconds
            bar.advance()
            bar.update("cuda, 16 tokens \x1b[2J")
        bar.say("a note")
        bar.advance()
    assert capsys.readouterr().err.splitlines() == [
        "tune: 0/4, packing",
        "tune: 3/4, 1 s left, cuda, 16 tokens \\x1b[2J",
        "a note",
    ]


def test_tables_follow_columns(cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    widest = {}
    for columns in ("60", "80", "0", None):
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
        out = cli("explain", SUMS, "--device", "h200")[1]
        widest[columns] = max(len(line) for line in out.splitlines() if "┃" in line or "│" in line)
    assert widest["60"] <= 60 < widest["80"] <= 80 < widest[None] == widest["0"]


@pytest.mark.parametrize(("columns", "lines"), [("60", True), ("32", False), ("20", False)])
def test_a_table_is_never_cut(
    columns: str, lines: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a narrow terminal it loses its lines first; words are broken only where they still do not fit."""
    monkeypatch.setenv("COLUMNS", columns)
    print_table(("tokens", "backend", "median", "error"), [(1, "reference", "25.1 us", "1.5e-03")])
    out = capsys.readouterr().out
    assert ("│" in out) == lines
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert all((word in out.split()) == (columns != "20") for word in ("reference", "1.5e-03"))
