"""Generations one after the other: what ends them early, their seeds, and their failures."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

import openai

from support.serving import CONTEXT, EVERY_WAY, UNENDING, Running, said, user

# --- Stop strings and limits ------------------------------------------------------------------------------------------


@EVERY_WAY
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("7", "-4", 3),
        ("73", "-4", 4),
        (["9", "3"], "-47", 4),
        (["473"], "-", 4),
        ("-", "", 1),
        ("\n", "-473", 5),
        (["never", "74"], "-473", 5),
        ("😀", "-473", 5),
    ],
)
def test_stop_strings(server: Running, stop: Any, text: str, tokens: int, chat: bool, stream: bool) -> None:
    assert said(server, stop=stop, chat=chat, stream=stream) == (text, "stop", tokens)


@EVERY_WAY
def test_an_answer_that_reaches_its_limit_is_cut_where_it_is(server: Running, chat: bool, stream: bool) -> None:
    assert said(server, max_tokens=2, stop="never", chat=chat, stream=stream) == ("-4", "length", 2)
    most = said(server, "1+2=", max_tokens=CONTEXT, chat=chat, stream=stream)
    assert most == ("3", "stop", 2)  # what the context has no room for behind this prompt is no error


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


def test_a_temperature_samples_and_a_seed_makes_it_repeatable(server: Running) -> None:
    def answers(**fields: Any) -> list[str]:
        return [said(server, chat=False, stream=False, **fields)[0] for _ in range(2)]

    hot = {"temperature": 50.0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    assert len(set(answers(**hot))) > 1
    assert len(set(answers(seed=5, **hot))) == 1
    assert answers(seed=5, **hot) != answers(seed=6, **hot)
    assert set(answers()) == set(answers(temperature=0)) == {"-473"}


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
