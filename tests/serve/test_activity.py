"""What a server logs of requests and throughput, and says at its start."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

from polymoe.serve.activity import access_log, log_throughput
from polymoe.serve.in_flight import InFlight
from polymoe.serve.log_limit import limited_logs
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.summary import summary
from support.serving import Running, batching_server, said


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f"polymoe.serve.{name}"]


def test_each_request_is_a_line(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    scope: dict[str, Any] = {"client": ("10.0.0.7", 5), "method": "POST", "path": "/v1/completions"}
    request = InFlight(prompt_tokens=4, new_tokens=2)
    with caplog.at_level(logging.INFO, "polymoe.serve"), limited_logs():
        for _ in range(20):
            access_log(request, scope, 200)
            access_log(InFlight(), scope | {"path": "/a\n200 b" + "c" * 999}, 401)
            access_log(InFlight(), scope | {"path": "/health"}, 200)
            access_log(InFlight(), scope | {"method": "GET", "path": "/v1/models"}, 200)
    assert len(lines(caplog, "access")) == 20
    first = lines(caplog, "access")[0]
    assert re.fullmatch(r"10\.0\.0\.7 POST '/v1/completions' 200 \d\.\d\d s, 4 \+ 2 tokens", first)
    other = lines(caplog, "other")
    assert len(other) == 10  # requests that cost nothing do not fill the log
    assert (max(map(len, other)) < 130, "\n" in "".join(other)) == (True, False)


def test_throughput_is_logged_while_there_are_requests(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    metrics = ServerMetrics(name="sums", model=server.model)

    async def run() -> None:
        task = asyncio.create_task(log_throughput(metrics, period_s=0.05))
        await asyncio.sleep(0.12)  # nothing happens
        request = InFlight(prompt_tokens=1000)
        metrics.in_flight.add(request)
        metrics.started(request)
        metrics.generated(request, 50)
        metrics.in_flight.add(InFlight())
        await asyncio.sleep(0.06)
        metrics.answered(request, "/v1/completions", 200)
        metrics.in_flight.clear()
        await asyncio.sleep(0.2)
        task.cancel()

    with caplog.at_level(logging.INFO, "polymoe.serve"):
        asyncio.run(run())
    first, second = lines(caplog, "throughput")
    assert "0 requests answered" in first
    assert "1 running, 1 waiting" in first
    assert " 0 prompt and 0.0 answer" not in first
    assert "1 requests answered, 0 prompt and 0.0 answer tokens/s; 0 running, 0 waiting" in second


def test_the_start_says_what_runs_where(server: Running) -> None:
    said_ = summary(server.served, server.model, limits="128 requests")
    values = dict(line.split(maxsplit=1) for line in said_.splitlines())
    assert values["model"] == "sums"
    assert values["experts"] == "reference (natural) in 4 layers for 1+ tokens"
    assert values["memory"] == "1.8 MiB of packed experts and 799.6 KiB of other weights on cpu"
    assert values["context"] == "256 tokens"
    assert values["requests"] == "one after the other (not asked for)"
    assert values["limits"] == "128 requests"
    with batching_server() as batches:
        assert "share forward passes, no CUDA graphs" in summary(batches.served, batches.model)
        assert "for keys and values of about" in summary(batches.served, batches.model)
        assert said(batches, "1+2=", chat=False, stream=False)[0] == "3"


def test_the_api_is_described(server: Running) -> None:
    """Without a key, because browsers send none."""
    assert "swagger" in server.get("/docs").text
    described = server.get("/openapi.json").json()
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert field in body["properties"]
        assert body["properties"]["top_p"]["description"] == "a number above 0, at most 1"
        assert "$ref" not in str(body)
    assert "/metrics" in described["paths"]
    assert server.get("/metrics").status == 401
