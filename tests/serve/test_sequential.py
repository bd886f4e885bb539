"""Generations one after the other: what ends them early, their seeds, and their failures."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from support.serving import CONTEXT, EVERY_WAY, UNENDING, Running, said, user

# --- Stop strings and limits ------------------------------------------------------------------------------------------


@EVERY_WAY
def test_an_answer_may_be_allowed_more_than_the_context_has_room_for(server: Running, chat: bool, stream: bool) -> None:
    most = said(server, "1+2=", max_tokens=CONTEXT, chat=chat, stream=stream)
    assert most == ("3", "stop", 2)


def test_goes_on_after_the_end_token_when_asked_to(server: Running) -> None:
    """Benchmarks ask for this, to get answers of a known length."""
    for stream in (False, True):
        body = {"model": "sums", "max_tokens": 8, "ignore_eos": True, "stream": stream}
        for path, question in (
            ("/v1/completions", {"prompt": "1+2="}),
            ("/v1/chat/completions", {"messages": user("1+2")}),
        ):
            answer = server.post(path, {**body, **question})
            assert answer.text.endswith("data: [DONE]\n\n") == stream
            last = answer.text.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
            assert json.loads(last)["usage"]["completion_tokens"] == 8
            assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    short = server.client().completions.create(model="sums", prompt="1+2=", extra_body={"ignore_eos": False})
    assert short.choices[0].text == "3"


# --- Sampling ---------------------------------------------------------------------------------------------------------


# --- Clients that leave, and failures ---------------------------------------------------------------------------------


def still_steps(server: Running) -> bool:
    """Whether the model computes further steps."""
    time.sleep(4 * server.seconds_a_step)  # for the step that runs, and for the news that the client has left
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
            server.post("/v1/chat/completions", {"model": "sums", "messages": user("1+2"), **UNENDING}, timeout=1.5)
        assert server.steps > start
        assert not still_steps(server)
        assert server.steps - start < 60
    assert server.client().completions.create(model="sums", prompt="1+2=").choices[0].text == "3"


@EVERY_WAY
def test_a_failure_is_an_error_of_openais_form(
    server: Running, monkeypatch: pytest.MonkeyPatch, chat: bool, stream: bool
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError('no "room"\nfor \\ this')

    monkeypatch.setattr(server.model, "generate", fail)
    with pytest.raises(openai.InternalServerError if not stream else openai.APIError) as failed:
        said(server, chat=chat, stream=stream)
    message = 'generation failed: no "room"\nfor \\ this'
    assert failed.value.body == {"message": message, "type": "server_error", "param": None, "code": None}
    body = {"messages": user("1+2")} if chat else {"prompt": "1+2="}
    reply = server.post("/v1/chat/completions" if chat else "/v1/completions", {**body, "stream": stream})
    if stream:
        *_, last, done, end = reply.text.split("\n\n")
        assert (json.loads(last.removeprefix("data: "))["error"]["message"], done, end) == (message, "data: [DONE]", "")
    monkeypatch.undo()
    assert said(server, "1+2=", chat=chat, stream=stream)[0] == "3"
