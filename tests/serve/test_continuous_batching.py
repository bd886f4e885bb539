"""Requests that share forward passes, by Transformers' own batching or a stand-in for it."""

from __future__ import annotations

import asyncio
import copy
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
from polymoe.serve import continuous_batching
from polymoe.serve.app import ModelServer
from polymoe.serve.continuous_batching import Batching, BatchingManager
from polymoe.serve.in_flight import IN_FLIGHT, InFlight
from polymoe.serve.limits import Limits
from polymoe.serve.metrics import ServerMetrics
from support.paged_attention import batching_config, plain_flash
from support.serving import CHECKPOINT, CONTEXT, HELDOUT, Running


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


def test_requests_share_forward_passes(server: Running, monkeypatch: Any) -> None:
    """With Transformers' continuous batching, and polymoe's attention computed by its definition."""
    monkeypatch.setattr(paged_attention, "_flash", plain_flash)
    settings = {"max_batch_tokens": 64, "max_memory_percent": 0.001}
    monkeypatch.setattr(paged_attention, "batching_config", lambda **_: batching_config(**settings))
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
