"""run: one verb on one checkpoint in a process of its own, with limits of time and memory, and what came of it.

The process is a fork of this one, in which torch and Transformers are imported already: a case costs a fraction of a
second.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attacks import forked_worker
from attacks.file_mutators import CANARY
from attacks.verbs import Refused

__all__ = ["Outcome", "run"]

PR_SET_CHILD_SUBREAPER = 36
MEMORY_BYTES = 4 * 2**30
"""Of address space that a case may use more than a process that has only imported everything."""
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
"""Audit events that no checkpoint may cause, unless the original causes the same."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a verb ended.

    Attributes:
        ended: ``answer``, ``refused``, ``raised``, ``crashed`` or ``hung``.
        answer: what it computed.
        error: type of the exception; of a crash, the signal.
        message: of the exception, or what stderr says.
        at: where it was raised or hung: the innermost line of polymoe, and the innermost one.
        did: forbidden things that it did, such as running code of the checkpoint.
        blocked: whether what hung waited for something that did not come, instead of computing.
        seconds, cpu_seconds, peak_bytes: what it took.
    """

    ended: str
    answer: str = ""
    error: str = ""
    message: str = ""
    at: str = ""
    did: tuple[str, ...] = ()
    blocked: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)


def run(
    verb: Callable[[str, int], str], checkpoint: Path, layer: int, limit_s: float, imported: Path | None = None
) -> Outcome:
    """Run ``verb`` on ``checkpoint``, in whose parent directory it may write. ``imported`` becomes a file with the
    names of the modules that it has imported."""
    home = checkpoint.parent
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _in_child(verb, checkpoint, layer, limit_s, imported)
        finally:
            os._exit(0)
    descriptor = os.pidfd_open(child)
    ended = bool(select.select([descriptor], [], [], limit_s)[0])
    os.close(descriptor)
    blocked = not ended and not _runs(child)
    os.kill(child, signal.SIGKILL)  # no more than a zombie if it has ended
    _, status, used = os.wait4(child, 0)
    _kill_strays()
    spent = {
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 3),
        "peak_bytes": used.ru_maxrss * 1024,
    }
    stderr = _text(home / "stderr")
    did = tuple(_text(home / "did").splitlines()) + (
        ("ran code of the checkpoint",) if (home / CANARY).exists() else ()
    )
    if not ended:
        return Outcome(
            "hung",
            error="hang",
            message=stderr[-500:],
            at=_stuck(_text(home / "stuck")),
            did=did,
            blocked=blocked,
            **spent,
        )
    if not (home / "result").exists():
        signals = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
        return Outcome("crashed", error=signals, message=stderr[-500:], at=_stuck(stderr), did=did, **spent)
    result = json.loads(_text(home / "result"))
    result["message"] = result.get("message") or stderr[-4000:]
    return Outcome(did=did, **result, **spent)


def _kill_strays() -> None:
    """End what the verb has started and left: with its parent gone, it is a child of this process."""
    for stray in _text(Path(f"/proc/self/task/{os.getpid()}/children")).split():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(int(stray), signal.SIGKILL)
            os.waitpid(int(stray), 0)


def _runs(process: int) -> bool:
    """Whether a thread of a process runs, or would if it got a processor."""
    states = (_text(path / "stat").rpartition(")")[2].split()[:1] for path in Path(f"/proc/{process}/task").iterdir())
    return any(state == ["R"] for state in states)


def _in_child(
    verb: Callable[[str, int], str], checkpoint: Path, layer: int, limit_s: float, imported: Path | None
) -> None:
    before = set(sys.modules)
    os.chdir(checkpoint.parent)
    Path("stdin").write_text("y\n" * 1000)
    for number, (name, flags) in enumerate((("stdin", os.O_RDONLY), ("stdout", None), ("stderr", None))):
        at = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND if flags is None else flags, 0o600)
        os.dup2(at, number)
        os.close(at)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)  # makes the pool of threads anew, which would fail in several threads at once
    stuck = open("stuck", "w")  # noqa: SIM115  # it stays open
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s * 0.9, file=stuck)
    forked_worker.fork_workers()
    did = _watch()
    result: dict[str, Any]
    try:
        result = {"ended": "answer", "answer": verb(checkpoint.name, layer)}
    except Refused:
        result = {"ended": "refused"}
    except BaseException as error:
        result = _described(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if imported is not None:
        imported.write_text("\n".join(name for name in sys.modules if name not in before))
    Path("did").write_text("\n".join(dict.fromkeys(did)))
    partial = Path("result.new")
    partial.write_text(json.dumps(result))
    partial.rename("result")


def _watch() -> list[str]:
    """Note what no checkpoint may cause from now on."""
    did: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in FORBIDDEN:
            return
        if event == "socket.connect" and str(args[1]).startswith(("('127.0.0.1'", "('::1'")):
            return
        if event == "os.fork" and sys._getframe(1).f_code.co_filename == forked_worker.__file__:
            return
        what = args[1] if event == "socket.connect" else args[0] if args else ""
        did.append(f"{event} {str(what)[:200]}")

    sys.addaudithook(hook)
    return did


def _described(error: BaseException) -> dict[str, Any]:
    from polymoe.errors import PolymoeError

    if isinstance(error, PolymoeError):
        return {"ended": "refused", "error": type(error).__name__, "message": f"error: {error}"}
    traceback.print_exception(error)
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return {"ended": "raised", "error": type(error).__name__, "message": str(error)[:2000], "at": _where(frames[::-1])}


def _where(frames: list[tuple[str, int]]) -> str:
    """The innermost line of polymoe, and the innermost one, of frames from the inside to the outside."""
    ours = next((f"{_short(f)}:{n}" for f, n in frames if "/polymoe/" in f), "")
    innermost = f"{_short(frames[0][0])}:{frames[0][1]}" if frames else ""
    return innermost if innermost == ours else f"{ours} < {innermost}"


def _short(file: str) -> str:
    return re.sub(r".*/(site-packages|src|lib/python[\d.]+)/", "", file)


def _stuck(dump: str) -> str:
    """Where the main thread is, from faulthandler's dump; it is the last one there."""
    last = dump.split("(most recent call first)")[-1]
    return _where([(m[1], int(m[2])) for m in re.finditer(r'File "([^"]+)", line (\d+)', last)])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
