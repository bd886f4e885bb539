"""What a server logs of requests, and says at its start."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from polymoe.engines.transformers import load
from polymoe.layer.offload import cache_stats_of
from polymoe.serve import logs
from polymoe.serve.app import ModelServer
from polymoe.serve.in_flight import InFlight
from polymoe.serve.logs import access_log, logging_to_stderr
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.summary import summary
from support.serving import CHECKPOINT, Running, batching_server, said


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f"polymoe.serve.{name}"]


def test_each_request_is_a_line(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    scope: dict[str, Any] = {"client": ("10.0.0.7", 5), "method": "POST", "path": "/v1/completions"}
    request = InFlight(prompt_tokens=4, new_tokens=2)
    with caplog.at_level(logging.INFO, "polymoe.serve"):
        access_log(request, scope, 200)
        access_log(InFlight(), scope | {"path": "/a\n200 b" + "c" * 999}, 401)
        access_log(InFlight(), scope | {"path": "/health"}, 200)
    [first], [other] = lines(caplog, "access"), lines(caplog, "other")
    assert re.fullmatch(r"10\.0\.0\.7 POST '/v1/completions' 200 \d\.\d\d s, 4 \+ 2 tokens", first)
    assert (len(other) < 130, "\n" in other) == (True, False)


def test_a_place_logs_ten_lines_a_minute(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    scope: dict[str, Any] = {"client": ("10.0.0.7", 5), "method": "POST", "path": "/v1/completions"}
    with logging_to_stderr("info"):
        for i in range(110):
            now = 100.0 if i == 109 else 0.0
            logging.getLogger("asyncio").error("line %d", i)
            access_log(InFlight(arrived_s=0), scope, 401)
            access_log(InFlight(arrived_s=0, prompt_tokens=1), scope, 200)
        logging.getLogger("asyncio").error("somewhere else")
    text = capfd.readouterr().err
    assert [text.count(part) for part in ("ERROR line", " 401 ", " 200 ", "somewhere else")] == [11, 11, 110, 1]
    assert "line 109 [99 more like this were not logged]" in text


FLOOD = """
import logging, sys, time
from polymoe.serve.logs import logging_to_stderr
with logging_to_stderr("info") as written:
    for _ in range(30_000):
        logging.getLogger("polymoe.serve.access").info("x" * 100)
    print("answered", flush=True)
    print(written(), flush=True)
import os; os._exit(0)
"""


def test_a_reader_that_does_not_read_costs_lines_only() -> None:
    with subprocess.Popen([sys.executable, "-c", FLOOD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.read() == b"answered\nFalse\n"  # stderr's pipe is full by then
        assert server.wait(10) == 0


@pytest.mark.parametrize(
    ("level", "seen"), [("info", ["INFO a", "WARNING b", "WARNING d", "ERROR c"]), ("error", ["ERROR c"])]
)
def test_lines_have_a_level(level: str, seen: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr(level) as written:
        log = logging.getLogger("polymoe.serve.x")
        log.info("a")
        log.warning("b")
        warnings.warn("d")
        logging.getLogger("uvicorn.error").error("c")
        assert written()
    found = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in capfd.readouterr().err.splitlines()]
    assert found == seen


def test_metrics_of_experts_in_host_memory(server: Running) -> None:
    assert b"polymoe_expert" not in ServerMetrics(name="sums", model=server.model).text()
    model, _ = load(CHECKPOINT, device="cpu", expert_memory="4slots")
    metrics = ServerMetrics(name="sums", model=model)
    model(torch.tensor([[1]]))
    found = metrics.text().decode()
    stats = cache_stats_of(model)
    assert list(stats) == [f"model.layers.{number}.mlp.experts" for number in range(4)]
    for layer, counted in stats.items():
        assert counted["misses"] > 0
        for key, number in counted.items():
            shown = re.findall(rf'^polymoe_expert_{key}_total{{layer="{layer}"}} (\S+)$', found, re.M)
            assert list(map(float, shown)) == ([] if key == "sweeps" else [number])


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


def test_the_start_says_whether_experts_are_packed() -> None:
    model, tokenizer = load(CHECKPOINT, device="cpu")
    assert " of dequantized experts and " in summary(ModelServer(model, tokenizer, name="sums"), model)


def test_the_api_is_described(server: Running) -> None:
    """Without a key, because browsers send none."""
    page = server.get("/docs").text
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(files) == 3
    for file in files:  # all of it is here: the page works without a network
        assert httpx.get(server.url + file).status_code == 200, file
    described = server.get("/openapi.json").json()
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert field in body["properties"]
        assert body["properties"]["top_p"]["description"] == "a number above 0, at most 1"
        assert "$ref" not in str(body)
    assert "/metrics" in described["paths"]
    assert server.get("/metrics").status == 401
