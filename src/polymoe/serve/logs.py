"""What a server logs, in a thread of its own: a reader of the log that does not read costs lines, never answers."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymoe.serve.in_flight import InFlight

access = logging.getLogger("polymoe.serve.access")
other = logging.getLogger("polymoe.serve.other")

_WAITING = 10_000
"""Lines that may wait to be written; more are dropped."""
_END_S = 0.5
_LINES = 10
_MINUTE_S = 60.0


class _Dropping(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        """Let the thread write a line, unless too many wait."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class _Limit(logging.Filter):
    """Passes ten records a minute of each place in the code, since clients can cause a thousand a second; the next one
    to pass says how many did not. Answered requests pass."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], tuple[float, int]] = {}  # start of the minute, records since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; its message may be changed."""
        if record.name == access.name:
            return True
        place, now = (record.pathname, record.lineno), time.monotonic()
        start, count = self._places.get(place, (now, 0))
        if now - start >= _MINUTE_S:
            if count > _LINES:
                record.msg = f"{record.getMessage()} [{count - _LINES} more like this were not logged]"
                record.args = None
            start, count = now, 0
        self._places[place] = start, count + 1
        return count < _LINES


@contextlib.contextmanager
def logging_to_stderr(level: str, *, requests: bool = True) -> Iterator[Callable[[], bool]]:
    """Write what is logged to stderr: polymoe's lines from this level on (in any case), each request if ``requests``,
    and warnings of other packages.

    Yields:
        Waits until all lines are written, at most half a second; whether they are then.
    """
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    root, stderr = logging.getLogger(), logging.StreamHandler()
    stderr.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    before = root.handlers, root.level
    handler = _Dropping(lines)
    handler.addFilter(_Limit())
    root.handlers = [handler]
    log = logging.getLogger("polymoe.serve")
    log.setLevel(level.upper())
    root.setLevel(max(log.level, logging.WARNING))
    show, warnings.showwarning = warnings.showwarning, _log_warning
    access.disabled = other.disabled = not requests
    writer = logging.handlers.QueueListener(lines, stderr)
    writer.start()

    def written() -> bool:
        end = time.monotonic() + _END_S
        while lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        return not lines.unfinished_tasks

    try:
        yield written
    finally:
        written()
        root.handlers, root.level = before
        warnings.showwarning = show


def _log_warning(message: Warning | str, *_: object) -> None:
    """Log a warning without its line of source, as the other commands print it."""
    logging.getLogger("py.warnings").warning("%s", message)


def access_log(request: InFlight, scope: MutableMapping[str, Any], status: int) -> None:
    """Log one request; but not what only asks how the server is. Those that generate nothing, such as refused ones,
    have a logger of their own, with a limit. ``scope`` is that of ASGI; status 499 means that the client closed
    the connection."""
    if scope["path"] in ("/health", "/metrics"):
        return
    client = (scope.get("client") or ("-",))[0]
    # A path may be anything, and a log has lines.
    line = f"{client} {scope['method']} {scope['path'][:80]!a} {status} {time.monotonic() - request.arrived_s:.2f} s"
    if request.prompt_tokens:
        line += f", {request.prompt_tokens} + {request.new_tokens} tokens"
    (access if status == 200 and request.prompt_tokens else other).info(line)
