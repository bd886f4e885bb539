"""The limit on log lines."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from polymoe.serve import log_limit
from polymoe.serve.log_limit import limited_logs


def test_a_place_logs_ten_lines_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(log_limit, "time", SimpleNamespace(monotonic=lambda: now))
    # Beside the filters of a server that other tests have started.
    polymoe, asyncio = logging.getLogger("polymoe"), logging.getLogger("asyncio")
    before = list(polymoe.filters)
    with limited_logs():
        for i in range(1000):
            polymoe.warning("line %d", i)
            asyncio.error(f"another {i}")
        assert caplog.messages == [text for i in range(10) for text in (f"line {i}", f"another {i}")]
        polymoe.warning("somewhere else")
        assert caplog.messages[-1] == "somewhere else"
        caplog.clear()
        now = 61.0
        for i in range(1000):
            polymoe.warning("line %d", i)
        assert len(caplog.messages) == 10
    assert polymoe.filters == before


def test_what_was_not_logged_is_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(log_limit, "time", SimpleNamespace(monotonic=lambda: now))
    with limited_logs():
        for i in range(110):
            now = 100.0 if i == 109 else 0.0
            logging.getLogger("polymoe").warning("line %d", i)
    assert caplog.messages[-1] == "line 109 [99 more like this were not logged]"
