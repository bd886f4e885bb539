"""PromptReader: limits on characters, and tokenization beside the event loop."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from polymoe.serve import app, prompts
from polymoe.serve.limits import Limits
from polymoe.serve.prompts import PromptReader, longest_token
from polymoe.serve.requests import ChatRequest
from support.serving import CONTEXT, TOOLS, Reply, Running, refused, running_server, user

CHARACTERS = CONTEXT * len("<|endoftext|>")


def test_the_longest_token_limits_the_characters_of_a_prompt(server: Running) -> None:
    assert longest_token(server.tokenizer) == len("<|endoftext|>")
    full = "<|endoftext|>" * (CONTEXT - 1)
    assert server.post("/v1/completions", {"prompt": full}).json()["usage"]["prompt_tokens"] == CONTEXT - 1


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_with_too_many_characters_is_not_tokenized(
    server: Running, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr(type(server.tokenizer), "_encode_plus", None)
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ messages[0].content }}")
    text = "1" * (CHARACTERS + 1)
    path, body = ("/v1/chat/completions", {"messages": user(text)}) if chat else ("/v1/completions", {"prompt": text})
    error = server.post(path, body).json()["error"]
    assert f"has {CHARACTERS + 1} characters" in error["message"]
    assert f"at most {CHARACTERS} characters" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_of_a_prompt_that_is_much_too_long_only_the_start_is_tokenized(server: Running) -> None:
    read: list[int] = []

    def tokenizer(text: str, **options: Any) -> Any:
        read.append(len(text))
        return server.tokenizer(text, **options)

    reader = PromptReader(tokenizer, Limits(CONTEXT))
    error = refused(lambda: reader.of_completion("1" * 10**6))
    assert (error["code"], max(read)) == ("context_length_exceeded", prompts.START * CONTEXT)
    # Many characters may be few tokens.
    [few] = reader.of_completion("<|endoftext|>" * (2 * CONTEXT))
    assert len(few) == 2 * CONTEXT


def test_a_template_that_adds_too_much_is_noticed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ messages[0].content * 1000 }}")
    asked = PromptReader(server.tokenizer, Limits(CONTEXT, characters=CHARACTERS))
    assert "characters" in refused(lambda: asked.of_chat(ChatRequest(messages=user("1+2="))))["message"]


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        (dict.fromkeys([name]), f"must not set {name}")
        for name in ("messages", "conversations", "conversation", "tools", "tokenize", "return_tensors", "eos_token")
    ]
    + [
        ({"load_audio_from_video": True}, "does not know load_audio_from_video"),
        ({"reasoning_effort": "low"}, "must not set reasoning_effort too"),
    ],
)
def test_names_that_a_template_does_not_read_are_refused(server: Running, kwargs: dict[str, Any], says: str) -> None:
    body = {"messages": user("1+2"), "chat_template_kwargs": kwargs, "reasoning_effort": "high"}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 400
    assert says in reply.json()["error"]["message"]


def test_tools_reach_a_template_that_knows_them(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ tools | length }}+{{ messages | length }}=")
    asked = PromptReader(server.tokenizer, Limits(None))
    ids = asked.of_chat(ChatRequest(messages=user("a") + user("b"), tools=TOOLS))
    assert server.tokenizer.decode(ids) == "1+2="


def test_other_requests_are_answered_while_one_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts do not even keep short ones from being tokenized."""
    released = threading.Event()
    tokenize = PromptReader.of_completion

    def slow(self: PromptReader, prompt: str) -> Any:
        if len(prompt) > 100:
            released.wait(20)
        return tokenize(self, prompt)

    monkeypatch.setattr(app, "LARGE_BYTES", 200)
    monkeypatch.setattr(PromptReader, "of_completion", slow)
    replies: list[Reply] = []
    with running_server() as server:
        ask = lambda: replies.append(server.post("/v1/completions", {"prompt": "0" * 250 + "1+2="}))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        server.until(lambda: len(server.served.metrics.in_flight) == 6)
        start = time.monotonic()
        assert server.get("/health").status == 200
        assert server.post("/v1/completions", {"prompt": "1+2="}).json()["choices"][0]["text"] == "3"
        assert time.monotonic() - start < 5
        assert not replies
        released.set()
        for thread in threads:
            thread.join()
    assert [reply.status for reply in replies] == [200] * 6


class PanicException(BaseException):
    """As the tokenizers package raises, which is no Exception."""


def test_a_prompt_on_which_the_tokenizer_fails_is_refused() -> None:
    def panic(*_: Any, **__: Any) -> Any:
        if read:
            raise PanicException("retry-limit-in-match over")
        read.append("the empty text, before there are requests")

    read: list[str] = []
    asked = PromptReader(panic, Limits(None))
    assert (
        "cannot read this prompt: PanicException: retry-limit"
        in refused(lambda: asked.of_completion("1+2="))["message"]
    )
    assert read


def test_a_thread_survives_what_is_no_exception(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(PromptReader, "of_completion", panic)
    for _ in range(5):  # more often than there are threads
        failed = server.post("/v1/completions", {"prompt": "1+2="})
        assert (failed.status, "index out of bounds" in failed.text) == (500, True)
    monkeypatch.undo()
    assert server.post("/v1/completions", {"prompt": "1+2="}).status == 200
