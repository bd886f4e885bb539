"""The server under load: 200 clients at once, for half a minute or for five, some of whom leave early.

To run it for another time: ``python -c "from serve.test_load import load; print(load(60))"`` in ``tests/``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

import httpx

from support.serving import server_process

CLIENTS = 200


@dataclass
class Load:
    """The outcome of a load.

    Attributes:
        outcomes: answers by kind; everything but "right", "left" and "429" is an error.
        memory_bytes: the server's resident memory every two seconds.
        stopped_s: from SIGTERM, with all clients at work, to the end of the process.
        exit_code, stdout, stderr: of the process.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    memory_bytes: list[int] = field(default_factory=list)
    stopped_s: float = 0.0
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""

    def growth(self) -> float:
        """Memory in the last fifth of the time over memory in the second fifth; the server warms up in the first."""
        fifth = len(self.memory_bytes) // 5
        return statistics.median(self.memory_bytes[-fifth:]) / statistics.median(self.memory_bytes[fifth : 2 * fifth])


def load(seconds: float, clients: int = CLIENTS) -> Load:
    """Start a server, put it under load, stop it."""
    with server_process() as (server, url):
        result = asyncio.run(_load(server, url, seconds, clients))
        out, err = server.communicate(timeout=20)
        result.exit_code, result.stdout, result.stderr = server.returncode, out, err
    return result


async def _load(server: subprocess.Popen[str], url: str, seconds: float, clients: int) -> Load:
    result, stopping = Load(), asyncio.Event()
    limits = httpx.Limits(max_connections=clients + 8, max_keepalive_connections=clients)
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120) as http:
        tasks = [
            asyncio.create_task(_client(http, random.Random(i), result.outcomes, stopping)) for i in range(clients)
        ]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            result.memory_bytes.append(_resident_bytes(server.pid))
            await asyncio.sleep(2)
        stopping.set()
        start = time.monotonic()
        server.send_signal(signal.SIGTERM)
        while server.poll() is None and time.monotonic() - start < 20:
            await asyncio.sleep(0.02)
        result.stopped_s = time.monotonic() - start
        await asyncio.gather(*tasks)
    return result


async def _client(http: Any, source: random.Random, outcomes: Counter[str], stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        a, b = source.randrange(1000), source.randrange(1000)
        patience = source.choice((None, None, None, 0.5, 3.0))  # seconds
        try:
            outcome = await asyncio.wait_for(_ask(http, source, a, b), patience)
        except asyncio.TimeoutError:
            outcome = "left"
        except httpx.HTTPError as error:
            outcome = repr(error)
        if stopping.is_set():
            return
        outcomes[outcome] += 1
        if outcome == "429":
            await asyncio.sleep(1)


async def _ask(http: Any, source: random.Random, a: int, b: int) -> str:
    """Ask for a sum in one of four ways; "right", "left", a status, or what was wrong."""
    chat, stream = source.random() < 0.5, source.random() < 0.5
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": f"{a}+{b}"}]} if chat else {"prompt": f"{a}+{b}="}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with http.stream("POST", path, json={**asked, "stream": stream, "max_tokens": 8}) as response:
        if response.status_code != 200:
            await response.aread()
            return str(response.status_code)
        if not stream:
            [choice] = json.loads(await response.aread())["choices"]
            text = choice["message"]["content"] if chat else choice["text"]
        else:
            leave, text = source.random() < 0.2, ""
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    part = json.loads(line.removeprefix("data: "))
                    if "error" in part:
                        return json.dumps(part)
                    text += (part["choices"][0]["delta"].get("content") if chat else part["choices"][0]["text"]) or ""
                    if leave and text:
                        return "left"
    return "right" if text == str(a + b) else f"{a}+{b}={text}"


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "seconds", [pytest.param(30, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.long)]
)
def test_two_hundred_clients(seconds: int) -> None:
    result = load(seconds)
    errors = {name: count for name, count in result.outcomes.items() if name not in ("right", "left", "429")}
    wrong = sum(count for name, count in errors.items() if "+" in name)
    assert wrong < 0.02 * result.outcomes["right"]  # the model itself misses some sums
    assert {name for name in errors if "+" not in name} == set()
    assert min(result.outcomes[name] for name in ("right", "left", "429")) > seconds / 3
    if seconds >= 300:  # in less time, memory for the first requests is still being taken
        assert result.growth() < 1.05
    assert result.stopped_s < 5
    assert (result.exit_code, result.stdout) == (0, "ended\n")
    assert "Traceback" not in result.stderr
    assert "ERROR" not in result.stderr
