"""Writing files (leaf: imports nothing of ours): a file is replaced, and a line appended, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["append_line", "append_whole", "is_cut_short", "replace_file"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_PAGE = 1 << 16  # bytes read at once


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file, or replace it: readers see the old content or the new one, also after a crash or a full disk.

    The content goes to a new file in the same directory, which is created and never opened through a link, and is then
    renamed. If ``path`` is a link, the link is replaced. An existing file's permissions are kept.

    Raises:
        OSError: if the file cannot be written; the old content is then still there.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}.new")
    descriptor = os.open(draft, _NEW, 0o666)
    try:
        try:
            with contextlib.suppress(FileNotFoundError):
                earlier = path.lstat().st_mode
                if stat.S_ISREG(earlier):
                    draft.chmod(stat.S_IMODE(earlier))
            _write_all(descriptor, content.encode() if isinstance(content, str) else content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which is created if missing. Processes that share it do not mix their lines.

    If the file ends in a JSON object that is cut short, as by a writer that was killed, that part is removed first. Any
    other last line without a line feed is kept and gets one.

    Raises:
        OSError: if the whole line cannot be written; the file is then as before.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with _locked(descriptor):
            end = _mend_end(descriptor)
            append_whole(descriptor, end + line.encode("utf-8", "backslashreplace") + b"\n")
    finally:
        os.close(descriptor)


def append_whole(descriptor: int, data: bytes) -> None:
    """Append bytes to a file that is open for appending, by this process alone, and wait until they are on disk.

    Raises:
        OSError: if not all can be written; what was written of them is removed.
    """
    size = _size(descriptor)
    try:
        _write_all(descriptor, data)
        if size is not None:
            os.fsync(descriptor)
    except BaseException:
        if size is not None:
            os.ftruncate(descriptor, size)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a write may take less than it is given, as where the disk is nearly full
        rest = rest[os.write(descriptor, rest) :]


def _mend_end(descriptor: int) -> bytes:
    """Remove a JSON object that is cut short from a file's end; return the line feed that another last line lacks."""
    size = _size(descriptor)
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return b""
    start, tail = size, b""
    while start and b"\n" not in tail:
        length = min(start, _PAGE)
        start -= length
        tail = os.pread(descriptor, length, start) + tail
    last = tail[tail.rfind(b"\n") + 1 :]
    if is_cut_short(last):
        os.ftruncate(descriptor, size - len(last))
        return b""
    return b"\n"


def is_cut_short(line: bytes) -> bool:
    """Whether a line without its line feed begins as a JSON object and is none: its writer was killed."""
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _size(descriptor: int) -> int | None:
    """Return the size of a file; None for a pipe or a terminal, which has none and cannot be synchronized."""
    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Wait until no other process appends. Where there are no such locks, lines are still appended in one piece."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except (ImportError, OSError):  # Windows; some network file systems
        pass
    yield  # closing the file unlocks it
