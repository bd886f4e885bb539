"""Attention for continuous batching: ragged requests against the definition, and whole answers through Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from polymoe.engines.transformers import load
from polymoe.engines.transformers import paged_attention as paged
from polymoe.errors import UnsupportedProblem
from support.packed_model import CHECKPOINT
from support.paged_attention import (
    QUERIES,
    SUMS_RIGHT,
    answers,
    attention,
    batching_config,
    by_definition,
    plain_flash,
    ragged,
)


@pytest.mark.parametrize("most", [0, 512])
@pytest.mark.parametrize("window", [0, 2])
def test_ragged_requests_are_attended_by_definition(monkeypatch: Any, window: int, most: int) -> None:
    monkeypatch.setattr(paged, "_flash", plain_flash)
    monkeypatch.setattr(paged, "_TOKEN_BY_TOKEN", most)
    query, key, value = ragged(padding=3)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 4.0])
    got = attention(query, key, value, sinks, window, monkeypatch)()
    torch.testing.assert_close(got[: sum(QUERIES)], by_definition(query, key, value, sinks, window))
    assert not got[sum(QUERIES) :].any()  # padding, of whose rows flash attention may write nothing


@pytest.fixture
def plain(monkeypatch: Any) -> Iterator[None]:
    monkeypatch.setattr(paged, "_flash", plain_flash)
    yield
    transformers.AttentionInterface._global_mapping.pop(paged.NAME, None)


@pytest.mark.parametrize("most", [0, 512])
@pytest.mark.usefixtures("plain")
def test_transformers_batches_continuously_with_it(monkeypatch: Any, most: int) -> None:
    monkeypatch.setattr(paged, "_TOKEN_BY_TOKEN", most)
    model, tokenizer = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    batching = batching_config(max_batch_tokens=16, max_memory_percent=0.001)  # prompts come in parts
    calls = []
    monkeypatch.setattr(paged, "_flash", lambda *args, **more: calls.append(1) or plain_flash(*args, **more))
    assert answers(model, tokenizer, batching, lambda _: paged.use(model)) == SUMS_RIGHT
    assert calls


@pytest.mark.parametrize("most", [3, *(pytest.param(most, marks=pytest.mark.slow) for most in (0, 64))])
@pytest.mark.usefixtures("plain")
def test_only_small_steps_are_captured_and_padded(monkeypatch: Any, most: int) -> None:
    """With Transformers' own runner and a stand-in for a graph, which records the inputs of each step."""
    monkeypatch.setattr(paged, "CAPTURED", most)
    model, tokenizer = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    steps = []

    def before(manager: Any) -> None:
        paged.use(model)
        create = manager._create_batch_processor

        def create_batch_processor() -> Any:
            processor = create()
            runner = processor.model_runner
            compute = runner.compute_batch

            def compute_batch(model: Any, data: Any) -> None:
                live = int(data["cu_seq_lens_q"][-1])
                steps.append((live, data["input_ids"].shape[-1], runner.use_cuda_graph_varlen))
                runner.use_cuda_graph_varlen = False
                compute(model, data)

            runner.compute_batch = compute_batch
            return processor

        manager._create_batch_processor = create_batch_processor
        paged.capture_small_steps(manager)

    batching = batching_config(max_batch_tokens=64, max_memory_percent=0.001, q_padding_interval_size=8)
    assert answers(model, tokenizer, batching, before) == SUMS_RIGHT
    assert {captured for live, _, captured in steps if live <= most} <= {True}
    assert {captured for live, _, captured in steps if live > most} <= {False}
    assert all(size == (-(-live // 8) * 8 if captured else live) for live, size, captured in steps)
    assert len({captured for *_, captured in steps}) == (2 if most == 3 else 1)


def test_it_needs_a_paged_cache() -> None:
    states = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedProblem, match="got no paged cache"):
        paged.paged_attention(torch.nn.Identity(), states, states, states, None)


def test_it_is_for_16_bit_on_a_gpu() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(head_dim=64))
    on_cpu = SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert not paged.runs_on(on_cpu)
