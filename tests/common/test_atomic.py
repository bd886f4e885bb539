"""Files are written whole or not at all: full disks, half lines, many writers, links where a draft would be."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from polymoe.common.atomic import append_line, append_whole, replace_file, require_new_file
from polymoe.errors import ArgumentError


def full_disk(room: int) -> Callable[[int, memoryview], int]:
    """``os.write`` on a disk with room for so many bytes."""
    real, left = os.write, [room]

    def write(descriptor: int, data: memoryview) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(descriptor, data[: left[0]])
        left[0] -= done
        return done

    return write


def test_a_write_may_take_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    append_line(tmp_path / "a", "x" * 100)
    append_line(tmp_path / "a", "y" * 100)
    replace_file(tmp_path / "b", "z" * 100)
    assert (tmp_path / "a").read_text() == "x" * 100 + "\n" + "y" * 100 + "\n"
    assert (tmp_path / "b").read_text() == "z" * 100


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "got ''\n  hint: name a file"),
        (".", "a directory\n  hint: name a file in it"),
        ("file", "which exists"),
        ("broken", "which exists"),
        ("no/file", "is no directory"),
        ("sealed/file", "cannot be written to"),
    ],
)
def test_what_is_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "sealed").mkdir()
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "sealed" and writable(path, mode))
    with pytest.raises(ArgumentError, match=re.escape(says)):
        require_new_file(name, "--file")
    assert require_new_file("new", "--file") == Path("new")


@pytest.mark.parametrize("room", [0, 1, 99])
def test_a_full_disk_leaves_files_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    path = tmp_path / "a"
    append_line(path, "first")
    for write in (append_line, replace_file):
        monkeypatch.setattr(os, "write", full_disk(room))
        with pytest.raises(OSError, match="No space") as caught:
            write(path, "x" * 100)
        assert write is append_line or caught.value.filename == str(path)
        assert path.read_text() == "first\n"
        assert os.listdir(tmp_path) == ["a"]
    monkeypatch.undo()
    append_line(path, "second")
    assert path.read_text() == "first\nsecond\n"


def test_a_limit_of_the_system_cuts_no_line_in_two(tmp_path: Path) -> None:
    """With a largest size of files, the system writes what fits of a line and reports the rest only at the next try."""
    code = (
        "import resource, sys; from pathlib import Path; from polymoe.common.atomic import append_line\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    [append_line(Path(sys.argv[1]), 'x' * 149) for _ in range(10)]\n"
        "except OSError as error: print(error.strerror)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "a"]
    said = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert said.stdout == "File too large\n", said.stderr
    assert (tmp_path / "a").read_text() == ("x" * 149 + "\n") * 6


def test_an_interrupt_takes_the_whole_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    append_line(tmp_path / "a", "first")
    monkeypatch.setattr(os, "fsync", interrupted)
    for write in (append_line, replace_file):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first\n"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("first", ["", '{"first": 1}\n', "x" * 70_000 + "\n"])
@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ('{"half', ""),
        ('{"half": "' + "x" * 70_000, ""),  # longer than what is read at once
        ('{"a":' * 10_000, ""),
        ('{"whole": 1}', '{"whole": 1}\n'),
        ("a note", "a note\n"),  # not a record: nothing that others wrote is removed
    ],
    ids=["half", "long", "deep", "whole", "other"],
)
def test_half_an_object_is_removed_before_the_next_line(first: str, end: str, kept: str, tmp_path: Path) -> None:
    """A writer that is killed between two pages of a line leaves the first."""
    (tmp_path / "a").write_text(first + end)
    append_line(tmp_path / "a", '{"second": 2}')
    assert (tmp_path / "a").read_text() == first + kept + '{"second": 2}\n'


def test_many_writers_keep_their_lines_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the system takes each line in small parts."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:11]))
    lines = [str(i) * 50 for i in range(10, 40)]
    threads = [threading.Thread(target=append_line, args=(tmp_path / "a", line)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((tmp_path / "a").read_text().splitlines()) == sorted(lines)


def test_a_link_where_the_draft_would_be_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious, path = tmp_path / "precious", tmp_path / "a"
    precious.write_text("precious")
    path.write_text("old")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0")
    (tmp_path / ".0.new").symlink_to(precious)
    with pytest.raises(FileExistsError):
        replace_file(path, "new")
    (tmp_path / ".0.new").unlink()
    (tmp_path / ".0.new").symlink_to(tmp_path / "elsewhere")  # a link to nothing
    with pytest.raises(FileExistsError):
        replace_file(path, "new")
    assert (precious.read_text(), path.read_text()) == ("precious", "old")
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_is_replaced_and_permissions_are_kept(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "a"
    precious.write_text("precious")
    precious.chmod(0o600)
    path.symlink_to(precious)
    replace_file(path, b"new")
    assert (precious.read_text(), path.read_text(), path.is_symlink()) == ("precious", "new", False)
    replace_file(precious, "other")
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600


def test_a_pipe_takes_lines_too() -> None:
    there, here = os.pipe()
    append_whole(here, b"line\n")
    append_line(Path(f"/dev/fd/{here}"), "second")
    os.close(here)
    assert os.read(there, 100) == b"line\nsecond\n"
    os.close(there)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for write in (append_line, replace_file):
        for path in (tmp_path / "directory", tmp_path / "no" / "a"):
            with pytest.raises(OSError):  # noqa: PT011 - the system's
                write(path, "text")
    assert os.listdir(tmp_path) == ["directory"]


SOURCE = Path(__file__).parents[2] / "src" / "polymoe"


def test_no_other_module_writes_files_its_own_way() -> None:
    """Drafts of a new directory and what other libraries write are named here."""
    allowed = {"common/atomic.py", "checkpoint/quantize.py", "checkpoint/write.py", "engines/transformers/tokenizer.py"}
    ways = (".write_text(", ".write_bytes(", "os.write(", '"w")', '"a")', '"wb")', '"ab")', ".savefig(path")
    found = {
        str(path.relative_to(SOURCE)): [way for way in ways if way in text]
        for path in sorted(SOURCE.rglob("*.py"))
        if any(way in (text := path.read_text(encoding="utf-8")) for way in ways)
    }
    found.pop("bench/records.py")  # check_writable opens, and writes nothing
    assert set(found) <= allowed, found
