"""Requests that share forward passes, by Transformers' own batching or a stand-in for it."""

from __future__ import annotations

import asyncio
import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

from fastapi import HTTPException

from polymoe.engines.transformers import load, paged_attention
from polymoe.errors import UnsupportedProblem
from polymoe.serve import app, continuous_batching
from polymoe.serve.app import ModelServer
from polymoe.serve.continuous_batching import Batching, BatchingManager
from polymoe.serve.in_flight import IN_FLIGHT, InFlight
from polymoe.serve.limits import Limits
from polymoe.serve.metrics import ServerMetrics
from support.paged_attention import batching_config, plain_flash
from support.serving import CHECKPOINT, CONTEXT, HELDOUT, Running, running_server, said


def test_continuous_batching_is_refused_on_a_cpu(server: Running) -> None:
    with pytest.raises(UnsupportedProblem, match="continuous batching"):
        ModelServer(server.model, None, name="sums", continuous_batching=True)


def test_graphs_are_where_they_can_be(monkeypatch: Any, server: Running) -> None:
    assert Batching.of(server.model, graphs=None, cache_memory=0.5) == Batching(
        cache_memory=0.5
    )  # not possible on a CPU
    with pytest.raises(UnsupportedProblem, match="CUDA graphs of continuous batching"):
        Batching.of(server.model, graphs=True, cache_memory=None)
    monkeypatch.setattr(paged_attention, "runs_on", lambda _: True)
    assert Batching.of(server.model, graphs=False, cache_memory=None) == Batching(paged=True)
    assert Batching.of(server.model, graphs=None, cache_memory=None) == Batching(
        paged=True
    )  # the reference backend reads tensors on the host
    with pytest.raises(UnsupportedProblem, match="got backend 'reference'"):
        Batching.of(server.model, graphs=True, cache_memory=None)
    monkeypatch.setattr(continuous_batching, "require_capturable", lambda _: None)
    assert Batching.of(server.model, graphs=None, cache_memory=None) == Batching(paged=True, graphs=True)


def test_continuous_batching_ends_what_nobody_waits_for(server: Running) -> None:
    """With a stand-in for Transformers' batching, which needs CUDA."""
    cancelled: list[str] = []
    batching = SimpleNamespace(
        background_thread_status=SimpleNamespace(fatal_error=None),
        register_result_handler=lambda request_id, handler: None,
        add_request=lambda ids, request_id, **_: request_id,
        cancel_request=cancelled.append,
    )
    metrics = ServerMetrics(name="sums", model=server.model)
    manager = BatchingManager(Limits(100), metrics, Batching())
    manager._cb = batching  # type: ignore[assignment]
    request = InFlight()

    async def ask_and_leave() -> None:
        IN_FLIGHT.set(request)
        config = SimpleNamespace(max_new_tokens=5, eos_token_id=1)
        answer = asyncio.create_task(
            manager.generate_non_streaming(server.model, server.tokenizer, {"input_ids": [1, 2]}, config, "same")
        )
        await asyncio.sleep(0.01)
        assert request.running
        request.leave()
        with pytest.raises(HTTPException) as left:
            await answer
        assert left.value.status_code == 499

    asyncio.run(ask_and_leave())
    assert len(cancelled) == 1
    assert cancelled != ["same"]  # clients may choose equal ids


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' continuous batching, with polymoe's attention computed by its definition."""
    monkeypatch.setattr(paged_attention, "_flash", plain_flash)
    settings = {"max_batch_tokens": 64, "max_memory_percent": 0.001}
    monkeypatch.setattr(paged_attention, "batching_config", lambda **_: batching_config(**settings))
    monkeypatch.setattr(paged_attention, "runs_on", lambda _: True)
    monkeypatch.setattr(app, "_require_cuda", lambda _: None)


@pytest.mark.usefixtures("on_a_cpu")
def test_a_server_answers_with_continuous_batching() -> None:
    """From requests to answers; fields that all requests share are refused if they say something else."""
    replies: list[Any] = []
    with running_server(batching=True) as server:

        def ask(question: str, chat: bool, stream: bool) -> None:
            replies.append(said(server, question, chat=chat, stream=stream, temperature=0))

        asked = [
            (row["prompt"], chat, stream) for row in HELDOUT[:2] for chat in (True, False) for stream in (True, False)
        ]
        threads = [threading.Thread(target=ask, args=arguments) for arguments in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [(row["answer"], "stop", len(row["answer"]) + 1) for row in HELDOUT[:2] for _ in range(4)]
        assert sorted(replies) == sorted(expected)
        assert said(server, "1+2=", chat=False, stream=True, max_tokens=6, extra_body={"ignore_eos": True})[2] == 6
        for field, value in (("temperature", 0.5), ("stop", "a"), ("seed", 1), ("logit_bias", {"3": 1})):
            refused = server.post("/v1/completions", {"prompt": "1+2=", field: value})
            assert (refused.status, refused.json()["error"]["param"]) == (400, field)
        long = server.post("/v1/completions", {"prompt": "1" * CONTEXT})
        assert long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.usefixtures("on_a_cpu")
def test_the_operator_chooses_the_temperature(server: Running) -> None:
    manager = BatchingManager(Limits(CONTEXT), ServerMetrics(name="sums", model=server.model), Batching())
    assert not manager.config(server.model).do_sample  # the checkpoint's own
    hot = BatchingManager(Limits(CONTEXT), manager.metrics, Batching(temperature=0.5))
    config = hot.config(server.model)
    assert (config.do_sample, config.temperature, config.use_cache) == (True, 0.5, False)


@pytest.mark.usefixtures("on_a_cpu")
def test_requests_share_forward_passes(server: Running) -> None:
    model, tokenizer = load(CHECKPOINT, device="cpu")
    metrics = ServerMetrics(name="sums", model=model)
    manager = BatchingManager(Limits(CONTEXT), metrics, Batching(paged=True))

    async def ask(row: Any) -> str:
        IN_FLIGHT.set(InFlight())
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = 8
        inputs = {"input_ids": tokenizer(row["prompt"])["input_ids"]}
        text, _, ids = await manager.generate_non_streaming(model, tokenizer, inputs, config, "same")
        assert len(ids) == len(row["answer"]) + 1
        return text

    async def ask_all(rows: Any) -> list[str]:
        return list(await asyncio.gather(*map(ask, rows)))

    manager.init_cb(model, model.generation_config)
    try:
        assert asyncio.run(ask_all(HELDOUT[:12])) == [row["answer"] for row in HELDOUT[:12]]
        assert model.config._attn_implementation == paged_attention.NAME
    finally:
        manager.stop()
