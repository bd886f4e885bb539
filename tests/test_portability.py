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


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "pread")


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
