"""The server, driven by OpenAI's own client: answers, refusals, clients that go away, and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

import openai

from polymoe.errors import ArgumentError, CheckpointNotFound, UnsupportedProblem
from polymoe.serve import bind, serve
from polymoe.serve.app import Limits, ModelServer
from support.serving import BYTES, CHECKPOINT, CONTEXT, HELDOUT, KEY, UNENDING, Running, user

# --- Answers --------------------------------------------------------------------------------------------------------


def test_lists_the_model_and_is_healthy(server: Running) -> None:
    assert [model.id for model in server.client().models.list()] == ["sums"]
    assert server.get("/health").json() == {"status": "ok"}


def test_completions_answer_sums(server: Running) -> None:
    for row in HELDOUT[:10]:
        answer = server.client().completions.create(model="sums", prompt=row["prompt"])
        assert answer.choices[0].text == row["answer"]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(row["prompt"])
        assert answer.usage.completion_tokens == len(row["answer"]) + 1


def test_chat_answers_sums(server: Running) -> None:
    answer: Any = server.client().chat.completions.create(model="sums", messages=user("What is 12+34?"))
    assert answer.choices[0].message.content == "46"
    assert answer.choices[0].finish_reason == "stop"


def test_streams_say_the_same_in_pieces(server: Running) -> None:
    client = server.client()
    chunks = list(client.completions.create(model="sums", prompt="512+499=", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "1011"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) > 2

    chat: Any = client.chat.completions.create(model="sums", messages=user("512+499"), stream=True)
    deltas = [c.choices[0] for c in chat]
    assert "".join(d.delta.content or "" for d in deltas) == "1011"
    assert deltas[-1].finish_reason == "stop"


def test_ends_at_max_tokens_and_at_the_context(server: Running) -> None:
    client = server.client()
    short = client.completions.create(model="sums", prompt="512+499=", max_tokens=2)
    assert (short.choices[0].text, short.choices[0].finish_reason) == ("10", "length")
    full: Any = client.chat.completions.create(model="sums", messages=user("1" * 240), **UNENDING)  # type: ignore[arg-type]
    assert full.usage.total_tokens == CONTEXT
    assert full.choices[0].finish_reason == "length"


def test_goes_on_after_the_end_token_when_asked_to(server: Running) -> None:
    """As benchmarks ask vLLM and SGLang, for answers of a length that is known."""
    for stream in (False, True):
        body = {"model": "sums", "max_tokens": 20, "ignore_eos": True, "stream": stream}
        for path, said in (
            ("/v1/completions", {"prompt": "1+2="}),
            ("/v1/chat/completions", {"messages": user("1+2")}),
        ):
            answer = server.post(path, {**body, **said})
            assert answer.text.endswith("data: [DONE]\n\n") == stream
            last = answer.text.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
            assert json.loads(last)["usage"]["completion_tokens"] == 20
            assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    short = server.client().completions.create(model="sums", prompt="1+2=", extra_body={"ignore_eos": False})
    assert short.choices[0].text == "3"


def test_32_requests_at_once(server: Running) -> None:
    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            requests = [
                client.completions.create(model="sums", prompt=row["prompt"], max_tokens=8) for row in HELDOUT[:16]
            ]
            chats = [
                client.chat.completions.create(model="sums", messages=user(row["prompt"]))  # type: ignore[arg-type]
                for row in HELDOUT[16:32]
            ]
            answers = await asyncio.gather(*requests, *chats)
        return [getattr(a.choices[0], "text", None) or a.choices[0].message.content for a in answers]

    assert asyncio.run(all_at_once()) == [row["answer"] for row in HELDOUT[:32]]


def test_null_means_left_out(server: Running) -> None:
    nothing = dict.fromkeys(("max_tokens", "stop", "n", "logprobs", "temperature", "stream"))
    answer = server.post("/v1/completions", {"model": "sums", "prompt": "1+2=", **nothing})
    assert answer.json()["choices"][0]["text"] == "3"


# --- Clients that go away -------------------------------------------------------------------------------------------


def still_steps(server: Running) -> bool:
    """Whether the model goes on, seen over a few of its steps."""
    time.sleep(4 * server.seconds_a_step)  # the step under way, and the news
    before = server.steps
    time.sleep(6 * server.seconds_a_step)
    return server.steps > before


def test_generation_ends_when_a_streaming_client_leaves(server: Running) -> None:
    with server.slow(0.05):
        start = server.steps
        stream: Any = server.client().chat.completions.create(
            model="sums",
            messages=user("1+2"),
            stream=True,
            **UNENDING,  # type: ignore[arg-type]
        )
        next(iter(stream))
        stream.close()
        assert not still_steps(server)
        assert server.steps - start < 30
    assert server.get("/health").status == 200
    assert server.client().completions.create(model="sums", prompt="1+2=").choices[0].text == "3"


def test_generation_ends_when_a_waiting_client_leaves(server: Running) -> None:
    with server.slow(0.05):
        start = server.steps
        with pytest.raises(TimeoutError):
            server.post("/v1/chat/completions", {"model": "sums", "messages": user("1+2"), **UNENDING}, timeout=0.5)
        assert server.steps > start
        assert not still_steps(server)
        assert server.steps - start < 60
    assert server.client().completions.create(model="sums", prompt="1+2=").choices[0].text == "3"


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, 3 * CONTEXT])
def test_a_prompt_longer_than_the_context_is_refused(server: Running, length: int, stream: bool) -> None:
    client = server.client()
    for call in (
        lambda: client.completions.create(model="sums", prompt="1" * length, stream=stream),
        lambda: client.chat.completions.create(model="sums", messages=user("1" * length), stream=stream),  # type: ignore[call-overload]
    ):
        with pytest.raises(openai.BadRequestError, match=rf"share a context of {CONTEXT}") as refused:
            call()
        assert refused.value.code == "context_length_exceeded"
    assert client.completions.create(model="sums", prompt="1" * (CONTEXT - 1)).choices


@pytest.mark.parametrize("key", ["wrong", KEY[:-1], KEY + "x", KEY.upper(), None])
def test_a_wrong_key_is_refused(server: Running, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    refused = server.get("/v1/models", headers)
    assert refused.status == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert server.get("/health").status == 200


def test_the_client_raises_for_a_wrong_key(server: Running) -> None:
    with pytest.raises(openai.AuthenticationError, match="API key"):
        server.client("wrong").completions.create(model="sums", prompt="1+2=")


@pytest.mark.parametrize("size", [BYTES + 1, 10 * BYTES, 400 * BYTES])
def test_an_oversized_request_is_refused(server: Running, size: int) -> None:
    try:
        assert server.post("/v1/completions", b"x" * size).status == 413
    except ConnectionError:
        assert size > 16 * BYTES  # far too much to be read to its end
    with pytest.raises(openai.APIStatusError) as refused:
        server.client().completions.create(model="sums", prompt="1" * (BYTES + 1))
    assert refused.value.status_code == 413


def test_a_request_in_chunks_counts_as_a_whole(server: Running) -> None:
    body = json.dumps({"model": "sums", "prompt": "1+2="}, indent=20).encode()
    chunks = [body[i : i + 7] for i in range(0, len(body), 7)]
    answer = server.post("/v1/completions", iter(chunks))
    assert answer.json()["choices"][0]["text"] == "3", answer.text
    assert server.post("/v1/completions", iter([b"x" * 1000] * 30)).status == 413


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ""}, "empty"),
        ({}, "prompt must be a string"),
        ({"prompt": ["1+2="]}, "prompt must be a string"),
        ({"prompt": "1+2=", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "1+2=", "max_tokens": CONTEXT + 1}, "has at most 256 tokens"),
        ({"prompt": "1+2=", "max_tokens": 10**6}, "max_tokens is 1000000"),
        ({"prompt": "1+2=", "max_tokens": 10**40}, "max_tokens"),
        ({"prompt": "1+2=", "temprature": 1}, "unknown parameter: 'temprature'"),
        ({"prompt": "1+2=", "messages": []}, "unknown parameter: 'messages'"),
        ({"prompt": "1+2=", "presence_penalty": 1}, "presence_penalty"),
        ({"prompt": "1+2=", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "1+2=", "max_tokens": True}, "max_tokens"),
        ({"prompt": "1+2=", "temperature": -1}, "temperature"),
        ({"prompt": "1+2=", "temperature": "hot"}, "temperature"),
        ({"prompt": "1+2=", "temperature": 10**400}, "temperature"),
        ({"prompt": "1+2=", "temperature": float("nan")}, "temperature"),
        ({"prompt": "\ud800"}, "Unicode"),
        ({"prompt": "1+2=", "top_p": 0}, "top_p"),
        ({"prompt": "1+2=", "frequency_penalty": -1}, "frequency_penalty"),
        ({"prompt": "1+2=", "n": 2}, "n must be 1"),
        ({"prompt": "1+2=", "best_of": 3}, "best_of"),
        ({"prompt": "1+2=", "echo": True}, "echo"),
        ({"prompt": "1+2=", "ignore_eos": "yes"}, "ignore_eos"),
        ({"prompt": "1+2=", "logprobs": 1}, "logprobs"),
        ({"prompt": "1+2=", "seed": -1}, "seed"),
        ({"prompt": "1+2=", "stop": [1]}, "stop"),
        ({"prompt": "1+2=", "stop": []}, "stop"),
        ({"prompt": "1+2=", "stop": ["3", ""]}, "stop"),
        ({"prompt": "1+2=", "stop": 7}, "stop"),
        ({"prompt": "1+2=", "stream": "yes"}, "stream"),
        ({"prompt": "1+2=", "suffix": 1}, "suffix"),
        ({"prompt": "1+2=", "generation_config": "{}"}, "generation_config"),
        ({"prompt": "1+2=", "model": "another"}, "another"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_completion_request_is_refused(server: Running, body: dict[str, Any], says: str) -> None:
    refused = server.post("/v1/completions", {"model": "sums", **body})
    assert refused.status == 400
    assert says in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_the_field_at_fault_is_named(server: Running) -> None:
    for field, code in (("nonsense", "unknown_parameter"), ("temperature", None)):
        error = server.post("/v1/completions", {"prompt": "1+2=", field: "x"}).json()["error"]
        assert (error["param"], error["code"]) == (field, code)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "1+2"}, "messages"),
        ({"messages": [{"content": "1+2"}]}, "role"),
        ({"messages": ["1+2"]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"text": "1+2"}]}]}, "content"),
        ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "tool call"),
        ({"messages": user("1+2"), "max_completion_tokens": -5}, "max_completion_tokens"),
        ({"messages": user("1+2"), "max_completion_tokens": 5000}, "max_completion_tokens is 5000"),
        ({"messages": user("1+2"), "prompt": "1+2="}, "unknown parameter: 'prompt'"),
        ({"messages": user("1+2"), "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": user("1+2"), "tool_choice": "required"}, "tool_choice"),
        ({"messages": user("1+2"), "top_logprobs": 5}, "top_logprobs"),
        ({"messages": user("1+2"), "logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"messages": user("1+2"), "logit_bias": {"1": "much"}}, "logit_bias"),
        ({"messages": user("1+2"), "logit_bias": {"one": 1}}, "logit_bias"),
        ({"messages": user("1+2"), "logit_bias": {"16": 1}}, "logit_bias"),
        ({"messages": user("1+2"), "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"messages": user("1+2"), "chat_template_kwargs": 3}, "chat_template_kwargs"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_chat_request_is_refused(server: Running, body: dict[str, Any], says: str) -> None:
    refused = server.post("/v1/chat/completions", {"model": "sums", **body})
    assert refused.status == 400
    assert says in refused.json()["error"]["message"]


def test_what_the_chat_template_refuses_is_said(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        server.client().chat.completions.create(model="sums", messages=user("1+2"))  # type: ignore[arg-type]


def test_a_failure_is_said_and_survived(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("no memory left")

    with monkeypatch.context() as broken:
        broken.setattr(server.model, "generate", fail)
        with pytest.raises(openai.InternalServerError, match="no memory left"):
            server.client().completions.create(model="sums", prompt="1+2=")
    assert server.client().completions.create(model="sums", prompt="1+2=").choices[0].text == "3"


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1]", b"[" * 10_000, b"\xff\xfe"], ids=repr)
def test_a_body_that_is_no_json_object_is_refused(server: Running, content: bytes) -> None:
    refused = server.post("/v1/completions", content)
    assert refused.status == 400
    assert refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/responses", "/v1/audio/transcriptions", "/docs", "/"])
def test_nothing_else_is_offered(server: Running, path: str) -> None:
    assert server.post(path, {"model": "sums"}).status == 404
    assert [model.id for model in server.client().models.list()] == ["sums"]


# --- Starting -------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:  # as another server does while it loads
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"127\.0\.0\.1:{port}.*in use"):
            serve(tmp_path / "no checkpoint", port=port)


@pytest.mark.parametrize(("host", "port"), [("no such host", 0), ("127.0.0.1", 70_000), ("192.0.2.1", 0)])
def test_an_address_that_is_not_ours_is_said(host: str, port: int, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=host):
        serve(tmp_path / "no checkpoint", host=host, port=port)


@pytest.mark.parametrize(
    "wrong", [{"api_key": ""}, {"max_tokens": 0}, {"max_request_bytes": 0}, {"max_concurrent_requests": 0}], ids=str
)
def test_empty_limits_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        serve(tmp_path / "no checkpoint", port=0, **wrong)


def test_an_open_server_without_a_key_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for host, key, warned in (("0.0.0.0", None, True), ("0.0.0.0", "key", False), ("127.0.0.1", None, False)):
        caplog.clear()
        with pytest.raises(CheckpointNotFound):
            serve(tmp_path / "no checkpoint", host=host, port=0, api_key=key)
        assert ("no API key" in caplog.text) == warned


def test_continuous_batching_is_refused_on_a_cpu(server: Running) -> None:
    with pytest.raises(UnsupportedProblem, match="continuous batching"):
        ModelServer(server.model, None, name="sums", continuous_batching=True)


@pytest.mark.parametrize(
    ("limits", "prompt", "wanted", "bound"),
    [
        (Limits(100), 40, None, 60),
        (Limits(100), 40, 1000, 60),
        (Limits(100), 40, 7, 7),
        (Limits(100, max_tokens=5), 40, 7, 5),
        (Limits(None), 40, 7, 7),
        (Limits(None), 40, None, None),
    ],
)
def test_limits(limits: Limits, prompt: int, wanted: int | None, bound: int | None) -> None:
    assert limits.bound(prompt, wanted) == bound


# --- Ending ---------------------------------------------------------------------------------------------------------

SERVE = """
import sys
from polymoe.serve import serve
serve(sys.argv[1], port=0, device="cpu", on_ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""
STUCK = """
import time
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssModel
GptOssModel.forward = lambda *_, **__: time.sleep(600)
"""


@contextmanager
def serving(code: str = SERVE) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    running = subprocess.Popen(
        [sys.executable, "-c", code, str(CHECKPOINT)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert running.stdout is not None
    url = running.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), running.communicate()
    yield running, url
    running.kill()
    running.communicate()


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with serving() as running:
        yield running


@pytest.mark.parametrize(("number", "busy"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)])
def test_ends_cleanly(process: tuple[subprocess.Popen[str], str], number: signal.Signals, busy: bool) -> None:
    running, url = process
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    assert client.completions.create(model=CHECKPOINT.name, prompt="1+2=").choices[0].text == "3"
    streams = []
    if busy:
        for _ in range(4):
            stream: Any = client.chat.completions.create(
                model=CHECKPOINT.name,
                messages=user("1+2"),
                stream=True,
                **UNENDING,  # type: ignore[arg-type]
            )
            streams.append(iter(stream))
        next(streams[0])
    start = time.monotonic()
    running.send_signal(number)
    out, err = running.communicate(timeout=20)
    assert time.monotonic() - start < 5
    assert running.returncode == 0, err
    assert out == "ended\n"
    assert "Traceback" not in err


def test_ends_in_the_middle_of_a_long_prompt() -> None:
    """Which no thread can be asked to leave: those who wait for it get an error, and the process goes without it."""
    refused: list[openai.APIStatusError] = []
    with serving(STUCK + SERVE) as (running, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

        def ask() -> None:
            with pytest.raises(openai.InternalServerError) as error:
                client.completions.create(model=CHECKPOINT.name, prompt="1+2=")
            refused.append(error.value)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        start = time.monotonic()
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=20)
        assert time.monotonic() - start < 5
        for thread in threads:
            thread.join()
    assert (running.returncode, out) == (0, "ended\n")
    assert "Traceback" not in err
    assert [error.status_code for error in refused] == [503] * 3
