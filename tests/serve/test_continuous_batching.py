"""Requests that share forward passes: Transformers' continuous batching with polymoe's attention by its definition."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from polymoe.engines.transformers import paged_attention
from polymoe.errors import UnsupportedProblem
from polymoe.serve import continuous_batching, shared_sampling
from polymoe.serve.app import ModelServer
from polymoe.serve.continuous_batching import Batching
from polymoe.serve.metrics import ServerMetrics
from support.serving import AUTHORIZED, CONTEXT, HELDOUT, Running, batching_server, said


@pytest.fixture(scope="module")
def batches() -> Iterator[Running]:
    with batching_server() as server:
        yield server


# --- What is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"continuous_batching": True}, {"graphs": True}, {"cache_memory": 0.5}], ids=str)
def test_continuous_batching_is_refused_on_a_cpu(server: Running, asked: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedProblem, match="continuous batching: expected one CUDA device, got cpu"):
        ModelServer(server.model, server.tokenizer, name="sums", **asked)


def test_it_is_the_default_where_the_model_allows_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**asked: Any) -> Any:
        metrics = ServerMetrics(name="sums", model=server.model)
        return continuous_batching.choose_generation(server.model, metrics, threading.Event(), **asked)[1]

    assert chosen() == "continuous batching needs one CUDA device, got cpu"
    assert chosen(shared=False) == "not asked for"
    monkeypatch.setattr(continuous_batching, "_require_cuda", lambda _: None)
    assert "attention without a cap" in chosen()  # Transformers' own attention would be slower
    monkeypatch.setattr(paged_attention, "runs_on", lambda _: True)

    class Fails(continuous_batching.ContinuousBatching):
        def _first_answer(self) -> str | None:
            return "out of memory"

    monkeypatch.setattr("polymoe.serve.continuous_batching.ContinuousBatching", Fails)
    before = server.model.config._attn_implementation
    assert chosen() == "continuous batching needs an answer of one token, got out of memory"
    assert server.model.config._attn_implementation == before
    with pytest.raises(UnsupportedProblem, match="out of memory"):
        chosen(shared=True)
    assert said(server, "1+2=", chat=False, stream=False)[0] == "3"


def test_a_transformers_without_what_is_used_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous_batching, "_require_cuda", lambda _: None)
    other = shared_sampling.Hook("transformers.generation.continuous_batching.model_runner", "Other")
    monkeypatch.setattr(shared_sampling, "HOOKS", (other,))
    with pytest.raises(UnsupportedProblem, match=r"model_runner\.Other, got none"):
        Batching.of(server.model, graphs=None, cache_memory=None)


def test_graphs_are_where_they_can_be(monkeypatch: Any, server: Running) -> None:
    monkeypatch.setattr(continuous_batching, "_require_cuda", lambda _: None)
    assert Batching.of(server.model, graphs=None, cache_memory=0.5) == Batching(cache_memory=0.5)
    with pytest.raises(UnsupportedProblem, match="CUDA graphs of continuous batching"):
        Batching.of(server.model, graphs=True, cache_memory=None)
    monkeypatch.setattr(paged_attention, "runs_on", lambda _: True)
    assert Batching.of(server.model, graphs=False, cache_memory=None) == Batching(paged=True)
    # The reference backend reads tensors on the host.
    assert Batching.of(server.model, graphs=None, cache_memory=None) == Batching(paged=True)
    with pytest.raises(UnsupportedProblem, match="got backend 'reference'"):
        Batching.of(server.model, graphs=True, cache_memory=None)
    monkeypatch.setattr(continuous_batching, "require_capturable", lambda _: None)
    assert Batching.of(server.model, graphs=None, cache_memory=None) == Batching(paged=True, graphs=True)


# --- What is answered -------------------------------------------------------------------------------------------------


def test_requests_share_forward_passes(batches: Running) -> None:
    """Each with its own sampling; alone, they would need as many steps as they have tokens."""
    replies: list[Any] = []

    def ask(question: str, chat: bool, stream: bool) -> None:
        replies.append(said(batches, question, chat=chat, stream=stream, temperature=0))

    asked = [(row["prompt"], chat, stream) for row in HELDOUT[:2] for chat in (True, False) for stream in (True, False)]
    threads = [threading.Thread(target=ask, args=arguments) for arguments in asked]
    start = batches.steps
    with batches.slow(0.05):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = [(row["answer"], "stop", len(row["answer"]) + 1) for row in HELDOUT[:2] for _ in range(4)]
    assert sorted(replies) == sorted(expected)
    assert batches.steps - start < sum(tokens for *_, tokens in expected)
    assert batches.model.config._attn_implementation == paged_attention.NAME


def test_a_prompt_longer_than_the_context_is_refused(batches: Running) -> None:
    long = batches.post("/v1/completions", {"prompt": "1" * CONTEXT})
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_generation_ends_when_nobody_waits(batches: Running) -> None:
    scheduler = batches.served.generation._cb.batch_processor.scheduler  # type: ignore[union-attr]
    with batches.slow(0.02):
        endless = {"prompt": "1+2=", "max_tokens": 200, "ignore_eos": True}
        with pytest.raises(TimeoutError):
            batches.post("/v1/completions", endless, timeout=0.5)
        batches.until(lambda: not scheduler.active_requests)
        stream: Any = batches.client().completions.create(
            model="sums", prompt="1+2=", stream=True, max_tokens=200, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        batches.until(lambda: not scheduler.active_requests)
        stopped = said(batches, chat=False, stream=False, stop="7", extra_body={"ignore_eos": True}, max_tokens=200)
        assert stopped == ("-4", "stop", 3)
        batches.until(lambda: not scheduler.active_requests)
    assert not batches.served.generation._sampling.samplers  # type: ignore[union-attr]
    assert batches.metric("polymoe_requests_running") == 0


def test_a_dead_worker_is_said(batches: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(fatal_error="no memory")
    monkeypatch.setattr(batches.served.generation._cb, "background_thread_status", status)  # type: ignore[union-attr]
    refused = batches.post("/v1/completions", {"prompt": "1+2="})
    assert (refused.status, "no memory" in refused.text) == (503, True)
    assert batches.get("/health").status == 503
    monkeypatch.undo()
    assert batches.get("/health", AUTHORIZED).status == 200
