"""A limit on log lines: what clients can cause a thousand times a second is logged a few times a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LogLimit", "limited_logs"]

_LOGGERS = ("polymoe", "polymoe.serve.other", "uvicorn.error", "asyncio", "transformers")
_LINES = 10
_PERIOD_S = 60.0


class LogLimit(logging.Filter):
    """Passes 10 records a minute of each place in the code; the next one to pass says how many did not."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], tuple[float, int]] = {}  # start of the minute, records since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; its message may be changed."""
        place, now = (record.pathname, record.lineno), time.monotonic()
        start, count = self._places.get(place, (now, 0))
        if now - start >= _PERIOD_S:
            if count > _LINES:
                record.msg = f"{record.getMessage()} [{count - _LINES} more like this were not logged]"
                record.args = None
            start, count = now, 0
        self._places[place] = start, count + 1
        return count < _LINES


@contextmanager
def limited_logs() -> Iterator[None]:
    """Limit the records of polymoe's, uvicorn's, asyncio's and Transformers' loggers."""
    limit, loggers = LogLimit(), [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)
