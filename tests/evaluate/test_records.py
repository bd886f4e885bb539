"""The file of answers: what is in it stays, whatever happens to the process; settings never mix."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from polymoe.errors import ArgumentError
from polymoe.evaluate.records import RecordFile, Settings, read_records
from support.evaluation import record

SETTINGS = Settings(data="set.jsonl", data_sha256="0" * 64, model="small")


WHOLE = json.dumps(asdict(record("c")))


def write(path: Path, *names: str) -> None:
    with RecordFile(path, SETTINGS) as file:
        for name in names:
            file.append(record(name))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    with RecordFile(path, SETTINGS) as file:
        file.append(record("a", text="−1\n\u2028 ünï 😀 \ud800"))  # half a surrogate pair too
        file.append(record("a", 1, answer=None, right=False, completion_tokens=None))
        settings, records = read_records(path)  # each is there at once
    assert settings == SETTINGS
    assert [(r.id, r.repeat, r.answer, r.completion_tokens) for r in records] == [
        ("a", 0, "1", 10),
        ("a", 1, None, None),
    ]
    assert records[0].text.startswith("−1\n\u2028 ünï 😀")
    assert len(path.read_bytes().splitlines()) == 3


def test_a_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "a", "b")
    with RecordFile(path, SETTINGS) as file:
        assert list(file.records) == [("a", 0), ("b", 0)]
        file.append(record("c"))
    assert [r.id for r in read_records(path)[1]] == ["a", "b", "c"]


@pytest.mark.parametrize("lost", [1, 20, 100])
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "a", "b")
    os.truncate(path, path.stat().st_size - lost)
    assert [r.id for r in read_records(path)[1]] == ["a"]
    with RecordFile(path, SETTINGS) as file:
        file.append(record("c"))
    assert [r.id for r in read_records(path)[1]] == ["a", "c"]


def test_settings_that_were_cut_off_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"settings": {"data": "se')
    write(path, "a")
    assert [r.id for r in read_records(path)[1]] == ["a"]


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "a")
    before = path.read_bytes()
    for other, says in (
        (replace(SETTINGS, temperature=0.6), r"others: temperature: None, not 0\.6"),
        (replace(SETTINGS, model="large", seed=1), "model: 'small', not 'large'; seed: None, not 1"),
        (replace(SETTINGS, data_sha256="1" * 64), "data_sha256"),
    ):
        with pytest.raises(ArgumentError, match=says) as refused:
            RecordFile(path, other)
        assert "--fresh" in str(refused.value)
    assert path.read_bytes() == before
    with RecordFile(path, replace(SETTINGS, temperature=0.6), fresh=True) as file:
        assert not file.records
    assert read_records(path)[0].temperature == 0.6


def test_another_file_is_never_written_to(tmp_path: Path) -> None:
    for content in ("no newline", "# Notes\n", '{"prompt": "1+1=", "answer": "2"}\n', "[]\n"):
        path = tmp_path / "notes"
        path.write_text(content)
        with pytest.raises(ArgumentError, match="notes"):
            RecordFile(path, SETTINGS)
        with pytest.raises(ArgumentError, match="notes"):
            RecordFile(path, SETTINGS, fresh=True)
        assert path.read_text() == content
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="a pipe or a device"):
        RecordFile(tmp_path / "pipe", SETTINGS)


def test_a_file_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with RecordFile(path, SETTINGS), pytest.raises(ArgumentError, match="no other run is writing"):
        RecordFile(path, SETTINGS, fresh=True)
    write(path, "a")


def test_of_two_answers_to_one_question_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "a", "b")
    lines = path.read_text().splitlines()
    again = json.dumps(json.loads(lines[1]) | {"text": "later"})
    path.write_text("\n".join([*lines, again, ""]))
    assert [(r.id, r.text) for r in read_records(path)[1]] == [("a", ""), ("b", "")]


@pytest.mark.parametrize(
    "line",
    ["{}", "[1]", "nonsense", '{"id": "a", "what": 1}', "[" * 10_000, "\xff", WHOLE.replace("10000000", '"soon"')],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, "a", "b")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, lines[2], ""]))
    with pytest.raises(ArgumentError, match=r"answers\.jsonl:3: expected a record of polymoe eval"):
        read_records(path)
    with pytest.raises(ArgumentError, match="settings of a run"):
        read_records(tmp_path / "empty" if (tmp_path / "empty").write_text("") == 0 else path)
    with pytest.raises(ArgumentError, match="No such file"):
        read_records(tmp_path / "absent")


def full() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    real = os.write
    with RecordFile(path, SETTINGS) as file:
        file.append(record("a"))
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        file.append(record("b"))  # in several parts
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]) if len(data) > 99 else full())
        with pytest.raises(OSError, match="No space"):
            file.append(record("x"))
        monkeypatch.undo()
        file.append(record("c"))
    assert [r.id for r in read_records(path)[1]] == ["a", "b", "c"]
