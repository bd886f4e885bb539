"""Progress on stderr: a bar of tqdm, as of the libraries that download and load, or lines without a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from polymoe.errors import printable

EVERY_S = 4.0
"""Seconds between lines where stderr is not a terminal."""


class Progress:
    """What a command does, how much of it is done, and when it will be finished.

    Args:
        what: the command's name.
        total: number of steps, if that is known.

    Attributes:
        done: number of steps that are done.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total, self._text, self.done = what, total, "", 0
        self._began, self._new, self._last = time.monotonic(), 0, 0.0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            form = None if self._total else "{desc} [{elapsed}]"
            self._bar = tqdm(total=self._total, desc=self._what, bar_format=form, dynamic_ncols=True, leave=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def start(self, done: int, total: int) -> None:
        """Set the number of steps, of which some were done before."""
        self.done, self._total = done, total
        if self._bar is not None:
            self._bar.bar_format = None
            self._bar.reset(total=total)
            self._bar.initial = done
            self._bar.update(done)

    def update(self, text: str) -> None:
        """Say what happens now."""
        self._text = printable(text)
        if self._bar is not None:
            self._bar.set_description_str(f"{self._what}: {self._text}")
            return
        self._line()

    def advance(self) -> None:
        """Count one step."""
        self.done += 1
        self._new += 1
        if self._bar is not None:
            self._bar.update()
        elif self.done == self._total:
            self._line()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def _line(self) -> None:
        now = time.monotonic()
        if self._last and now - self._last < EVERY_S:
            return
        self._last = now
        parts = [f"{self.done}/{self._total}"] if self._total else []
        if self._new and self._total:
            parts.append(f"{(now - self._began) / self._new * (self._total - self.done):.0f} s left")
        self.say(f"{self._what}: {', '.join([*parts, *([self._text] if self._text else [])])}")
