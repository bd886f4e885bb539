"""Progress on stderr: a bar of tqdm, as of the libraries that download and load, or lines without a terminal."""

from __future__ import annotations

import sys
import time

from polymoe.errors import printable

EVERY_S = 4.0
"""Seconds between lines where stderr is not a terminal."""


class Progress:
    """What a command does, how much of it is done, and, if the number of steps is known, when it will be finished."""

    def __init__(self, what: str, total: int | None = None) -> None:
        from tqdm import tqdm

        self._what, self._total, self._text, self._done = what, total, "", 0
        self._began, self._last = time.monotonic(), 0.0
        self._lines = not sys.stderr.isatty()
        form = None if total else "{desc} [{elapsed}]"
        self._bar = tqdm(total=total, desc=what, bar_format=form, dynamic_ncols=True, leave=False, disable=self._lines)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, text: str) -> None:
        """Say what happens now."""
        self._text = printable(text)
        self._bar.set_description_str(f"{self._what}: {self._text}")
        if self._lines:
            self._line()

    def advance(self) -> None:
        """Count one step."""
        self._done += 1
        self._bar.update()
        if self._lines and self._done == self._total:
            self._line()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def _line(self) -> None:
        now = time.monotonic()
        if self._last and now - self._last < EVERY_S:
            return
        self._last = now
        parts = [f"{self._done}/{self._total}"] if self._total else []
        if self._done and self._total:
            parts.append(f"{(now - self._began) / self._done * (self._total - self._done):.0f} s left")
        self.say(f"{self._what}: {', '.join([*parts, *([self._text] if self._text else [])])}")
