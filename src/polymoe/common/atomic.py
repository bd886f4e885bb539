"""Writing files (leaf: imports errors alone): a file is replaced, and a line appended, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from polymoe.errors import ArgumentError

_BINARY = getattr(os, "O_BINARY", 0)  # without it Windows writes a carriage return before each line feed
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | _BINARY
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
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # a write that fails names no file
        raise


def require_new_file(path: str | Path, where: str) -> Path:
    """Return the path of a file that will be made, after hours perhaps.

    Args:
        path: of the file.
        where: the argument that names it, for errors.

    Raises:
        ArgumentError: for no name, if it exists, or its directory does not or cannot be written to.
    """
    found = Path(path)
    if not str(path):
        got, hint = "''", "name a file"
    elif found.is_dir():
        got, hint = f"{str(path)!r}, a directory", "name a file in it"
    elif os.path.lexists(found):
        got, hint = f"{str(path)!r}, which exists", "name another file, or remove this one"
    elif not found.parent.is_dir():
        got, hint = f"{str(path)!r}", f"{found.parent} is no directory"
    elif not os.access(found.parent, os.W_OK):
        got, hint = f"{str(path)!r}", f"{found.parent} cannot be written to"
    else:
        return found
    raise ArgumentError(where, expected="a new file in a directory that can be written to", got=got, hint=hint)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which is created if missing. Processes that share it do not mix their lines.

    If the file ends in a JSON object that is cut short, as by a writer that was killed, that part is removed first. Any
    other last line without a line feed is kept and gets one.

    Raises:
        OSError: if the whole line cannot be written; the file is then as before.
    """
    descriptor = open_to_append(path)
    try:
        with locked(path, descriptor):
            end = _mend_end(descriptor)
            append_whole(descriptor, end + line.encode("utf-8", "backslashreplace") + b"\n")
    finally:
        os.close(descriptor)


def open_to_append(path: Path) -> int:
    """Return a descriptor of a file to read and to append bytes to; the file is created if missing."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _BINARY, 0o666)


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
    if not size or _read_at(descriptor, size - 1, 1) == b"\n":
        return b""
    start, tail = size, b""
    while start and b"\n" not in tail:
        length = min(start, _PAGE)
        start -= length
        tail = _read_at(descriptor, start, length) + tail
    last = tail[tail.rfind(b"\n") + 1 :]
    if is_cut_short(last):
        os.ftruncate(descriptor, size - len(last))
        return b""
    return b"\n"


def _read_at(descriptor: int, start: int, length: int) -> bytes:
    os.lseek(descriptor, start, os.SEEK_SET)  # Windows has no pread
    return os.read(descriptor, length)


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
def locked(path: Path, descriptor: int, *, wait: bool = True) -> Iterator[None]:
    """Lock a file against other processes, and other threads, that lock it too.

    The file itself is locked; on Windows, where that would keep others from reading it, ``PATH.lock`` beside it. File
    systems without locks are no error: what is appended there is still written in one piece.

    Args:
        path: of the file.
        descriptor: of the same file, open for writing; closing it unlocks it.
        wait: until it is free.

    Raises:
        BlockingIOError: if another process has it and ``wait`` is False.
    """
    with contextlib.ExitStack() as held:
        if sys.platform == "win32":
            held.enter_context(_lock_beside(path, wait))
        else:
            import fcntl

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
            except BlockingIOError:
                raise
            except OSError:  # some network file systems
                pass
        yield


def _lock_beside(path: Path, wait: bool) -> contextlib.AbstractContextManager[object]:
    """An acquired lock of the file's own, as a context that releases it."""
    from filelock import FileLock, Timeout

    try:
        return FileLock(path.with_name(path.name + ".lock")).acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise BlockingIOError(f"{path} is in use") from error
