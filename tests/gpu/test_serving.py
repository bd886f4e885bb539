"""A server with continuous batching on a GPU: every field in shared, captured and prefilled steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

from support.serving import EVERY_WAY, HELDOUT, Running, running_server, said

ON = {"ignore_eos": True}


@pytest.fixture(scope="module", params=[None, False], ids=["graphs", "no graphs"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running_server(batching=None, device="cuda", graphs=request.param) as server:
        batching: Any = server.served.generation.batching  # type: ignore[union-attr]
        assert (batching.paged, batching.graphs) == (True, request.param is None)
        yield server


def test_it_is_the_default_and_answers_at_once(gpu: Running) -> None:
    replies: dict[str, Any] = {}

    def ask(row: Any, i: int) -> None:
        fields: dict[str, Any] = {"temperature": 0} if i % 2 else {"seed": i, "extra_body": {"top_k": 1}}
        replies[row["prompt"]] = said(gpu, row["prompt"], chat=i % 3 == 0, stream=i % 4 < 2, **fields)[0]

    asked = HELDOUT[:48]
    threads = [threading.Thread(target=ask, args=(row, i)) for i, row in enumerate(asked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = sum(replies[row["prompt"]] == row["answer"] for row in asked)
    assert right >= len(asked) - 1  # 16-bit sums in another order


@EVERY_WAY
def test_fields(gpu: Running, chat: bool, stream: bool) -> None:
    def ask(**fields: Any) -> tuple[Any, ...]:
        return said(gpu, chat=chat, stream=stream, **fields)

    assert ask(stop="7") == ("-4", "stop", 3)
    assert ask(extra_body={"stop_token_ids": [10]}) == ("-4", "stop", 3)
    assert ask(max_tokens=40, extra_body=ON)[1:] == ("length", 40)
    assert ask(max_tokens=4, extra_body={"logit_bias": {"7": 100}}) == ("4444", "length", 4)
    assert ask(extra_body={"repetition_penalty": 100})[0] != "-473"
    hot = {"temperature": 50.0, "max_tokens": 12, "extra_body": ON}
    assert len({ask(**hot)[0] for _ in range(3)}) > 1
    assert len({ask(**hot, seed=3)[0] for _ in range(3)}) == 1
    spread = {"frequency_penalty": 2, "presence_penalty": 2, "max_tokens": 12, "extra_body": ON}
    assert len(set(ask(**spread)[0])) > 3


def test_log_probabilities_arrive_with_their_tokens(gpu: Running) -> None:
    """They are copied beside the tokens, which other requests share a step with."""
    done = threading.Event()

    def company() -> None:
        while not done.is_set():
            said(gpu, "512+499=", chat=False, stream=True, temperature=1.0)

    thread = threading.Thread(target=company)
    thread.start()
    try:
        for _ in range(20):
            answer: Any = gpu.client().completions.create(model="sums", prompt="498-971=", logprobs=2, temperature=0)
            found = answer.choices[0].logprobs
            assert found.tokens[:4] == ["-", "4", "7", "3"]
            for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
                assert -1 < value <= 0
                assert top[token] == value == max(top.values())
    finally:
        done.set()
        thread.join()
