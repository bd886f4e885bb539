"""Windows, as far as it can be shown elsewhere: files are locked and appended to without ``fcntl`` and ``os.pread``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import filelock  # noqa: F401  # before fcntl is taken away: on Windows it has another lock, here this one stands for it
import pytest

from polymoe.common import atomic
from polymoe.errors import ArgumentError
from polymoe.evaluate.records import AnswerRecord, RecordFile, Settings, read_records

SETTINGS = Settings(data="d", data_sha256="0", model="m")
ANSWER = AnswerRecord(
    id="q", repeat=0, expected="1", answer="1", correct=True, text="1", finish_reason="stop", prompt_tokens=1,
    completion_tokens=1, latency_us=1, ended_us=1,
)  # fmt: skip


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "pread")


@pytest.mark.usefixtures("windows")
def test_records_in_use_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordFile(path, SETTINGS) as records:
        records.append(ANSWER)
        with pytest.raises(ArgumentError, match="one in use"):
            RecordFile(path, SETTINGS)
        assert read_records(path)[1] == [ANSWER]  # which others may read meanwhile
    with RecordFile(path, SETTINGS) as records:
        assert list(records.records) == [("q", 0)]


@pytest.mark.usefixtures("windows")
def test_a_refused_file_is_unlocked(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("{}\n")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="another file"):
            RecordFile(path, SETTINGS)


@pytest.mark.usefixtures("windows")
def test_a_line_that_was_cut_short_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line in ('{"a": 1}', '{"b": 2}'):
        path.write_bytes((path.read_bytes() if path.exists() else b"") + b'{"cut')
        atomic.append_line(path, line)
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'


@pytest.mark.usefixtures("windows")
def test_a_line_waits_for_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "a"
    other = (
        "import sys; from pathlib import Path; from filelock import FileLock\n"
        "path = Path(sys.argv[1])\n"
        "with FileLock(f'{path}.lock'):\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
        "    path.write_text('other\\n')\n"
    )
    command = [sys.executable, "-c", other, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(BlockingIOError), atomic.locked(path, -1, wait=False):
            pass
        assert process.stdin is not None
        process.stdin.close()
        atomic.append_line(path, "mine")
    assert path.read_text() == "other\nmine\n"


@pytest.mark.long
def test_a_type_checker_finds_nothing_that_windows_lacks() -> None:
    command = [sys.executable, "-m", "pyright", "--pythonplatform", "Windows"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
