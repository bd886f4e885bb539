"""Servers for tests, in this process or in another one, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import HTTPException
from prometheus_client.parser import text_string_to_metric_families

from polymoe.engines.transformers import load, paged_attention
from polymoe.serve import continuous_batching
from polymoe.serve.app import ModelServer
from polymoe.serve.gate import Gate
from polymoe.serve.http_server import HttpServer, bind
from support.paged_attention import batching_config, plain_flash

MODELS = Path(__file__).parents[2] / "models"
CHECKPOINT = MODELS / "sums-gpt-oss-mxfp4"
HELDOUT = [json.loads(line) for line in (MODELS / "sums-heldout.jsonl").read_text().splitlines()]
KEY = "a key, and a long one"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
BYTES = 20_000
CONTEXT = 256
UNENDING = {"logit_bias": {"1": -100}}  # of the end token, so that answers fill the context
TOOLS: Any = [{"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}]
EVERY_WAY = pytest.mark.parametrize(("chat", "stream"), [(c, s) for c in (False, True) for s in (False, True)])
MOST_WAYS = pytest.mark.parametrize(
    ("chat", "stream"),
    [(False, True), (True, False), *(pytest.param(both, both, marks=pytest.mark.slow) for both in (False, True))],
)
"""Every way, of which two are slow."""
SERVE = """
import sys
from polymoe.serve import serve
serve(sys.argv[1], port=0, device="cpu", api_key="key", on_ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""
"""A server in a process of its own: prints its URL, and "ended" after a clean end."""
COMMAND = """
import sys
import polymoe.cli.serve as command
from polymoe.cli import main
say = command.say
def said(text):
    say(text)
    if "serving on" in text:
        print(text.split()[-1], flush=True)
command.say = said
sys.argv = ["polymoe", "serve", sys.argv[1], *"--port 0 --device cpu --api-key key --grace 0".split()]
main()
"""
"""The command in a process of its own: prints its URL."""


@dataclass
class Reply:
    """An HTTP response."""

    status: int
    headers: Any
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Running:
    """A server in a thread of this process.

    Attributes:
        steps: forward passes that its model has started.
        seconds_a_step: least duration of a forward pass.
        released: forward passes wait until this is set.
    """

    port: int
    model: Any
    tokenizer: Any
    served: ModelServer
    gate: Gate
    http: HttpServer
    loop: asyncio.AbstractEventLoop | None = None
    steps: int = 0
    seconds_a_step: float = 0.0
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEY) -> openai.OpenAI:
        # Nothing is encrypted here, and reading the certificates of this machine takes longer than an answer.
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self._send("GET", path, None, headers or {}, 60)

    def post(self, path: str, body: dict[str, Any] | bytes | Iterable[bytes], timeout: float = 60) -> Reply:
        headers = {**AUTHORIZED, "Content-Type": "application/json"}
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        return self._send("POST", path, content, headers, timeout)

    def _send(self, method: str, path: str, content: Any, headers: dict[str, str], timeout: float) -> Reply:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return Reply(answer.status, answer.headers, answer.read().decode())

    def call(self, fn: Callable[[], None]) -> None:
        """Call something in the server's event loop."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(fn)

    @contextlib.contextmanager
    def slow(self, seconds_a_step: float) -> Iterator[None]:
        """Make forward passes take at least so many seconds."""
        self.seconds_a_step = seconds_a_step
        try:
            yield
        finally:
            self.seconds_a_step = 0.0

    @contextlib.contextmanager
    def held(self, *, busy: bool = False) -> Iterator[None]:
        """Stop the model, once it is idle unless ``busy``, at its next forward pass until the end of the block."""
        if not busy:  # it may still work for a client that has left, whose request is not in flight any more
            self.served.generation.thread.submit(lambda: None).result(20)  # type: ignore[union-attr]
        self.released.clear()
        try:
            yield
        finally:
            self.released.set()

    def metric(self, name: str, **labels: str) -> float:
        """The value of a sample of ``/metrics``; 0 if there is none."""
        text = self.get("/metrics", AUTHORIZED).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    def until(self, holds: Callable[[], bool], seconds: float = 20) -> None:
        """Wait until ``holds()``."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"it does not hold after {seconds} s"
            time.sleep(0.005)


@contextlib.contextmanager
def batching_server() -> Iterator[Running]:
    """A server whose requests share forward passes on a CPU, with polymoe's attention computed by its definition."""
    settings = {"max_batch_tokens": 64, "max_memory_percent": 0.001}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "_flash", plain_flash)
        patch.setattr(paged_attention, "batching_config", lambda **_: batching_config(**settings))
        patch.setattr(paged_attention, "runs_on", lambda _: True)
        patch.setattr(continuous_batching, "_require_cuda", lambda _: None)
        with running_server(batching=None) as server:
            assert not server.served.not_shared
            yield server


@contextlib.contextmanager
def running_server(
    connections: int = 200,
    *,
    batching: bool | None = False,
    graphs: bool | None = None,
    device: str = "cpu",
    **limits: Any,
) -> Iterator[Running]:
    """A server around the trained checkpoint, in a thread; ``limits`` are the gate's."""
    model, tokenizer = load(CHECKPOINT, device=device, backend="reference" if device == "cpu" else "auto")
    served = ModelServer(model, tokenizer, name="sums", continuous_batching=batching, graphs=graphs)
    with bind("127.0.0.1", 0) as listener:
        gate = Gate(served.app, metrics=served.metrics, **{"api_key": KEY, "max_request_bytes": BYTES, **limits})
        http = HttpServer(gate, listener, most=connections, stop_s=1)
        running = Running(listener.getsockname()[1], model, tokenizer, served, gate, http)

        def count(*_: Any) -> None:
            running.steps += 1
            time.sleep(running.seconds_a_step)
            running.released.wait(60)

        def ready() -> None:
            running.loop = asyncio.get_running_loop()

        http.on_ready = ready
        running.released.set()
        model.register_forward_pre_hook(count)
        thread = threading.Thread(target=http.run)
        thread.start()
        while running.loop is None:
            time.sleep(0.005)
        try:
            yield running
        finally:
            http.should_exit = True
            thread.join()
            served.close()


@contextlib.contextmanager
def server_process(code: str = SERVE) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    running = subprocess.Popen(
        [sys.executable, "-c", code, str(CHECKPOINT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), running.communicate()
        yield running, url
    finally:
        running.kill()
        running.communicate()


def refused(call: Callable[[], Any]) -> dict[str, Any]:
    """The error of something that the server refuses with 400."""
    with pytest.raises(HTTPException) as error:
        call()
    assert error.value.status_code == 400
    detail: Any = error.value.detail
    return detail["error"]


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def said(server: Running, question: str = "498-971=", *, chat: bool, stream: bool, **fields: Any) -> tuple[Any, ...]:
    """Text, finish reason and new tokens of an answer."""
    client = server.client()
    if chat:
        answer: Any = client.chat.completions.create(model="sums", messages=user(question), stream=stream, **fields)
        get = lambda choice: choice.delta.content if stream else choice.message.content  # noqa: E731
    else:
        answer = client.completions.create(model="sums", prompt=question, stream=stream, **fields)
        get = lambda choice: choice.text  # noqa: E731
    parts = list(answer) if stream else [answer]
    text = "".join(get(part.choices[0]) or "" for part in parts)
    return text, parts[-1].choices[0].finish_reason, parts[-1].usage.completion_tokens
