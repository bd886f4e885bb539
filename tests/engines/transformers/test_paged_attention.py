"""Attention for continuous batching: ragged requests against the definition, and whole answers through Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from polymoe.engines.transformers import load
from polymoe.engines.transformers import paged_attention as paged
from polymoe.errors import UnsupportedProblem
from support.packed_model import CHECKPOINT
from support.paged_attention import batching_config, plain_flash

SUMS_ASKED, SUMS_RIGHT = ["123+456=", "12+4=", "700-12=", "998+999="], ["579", "16", "688", "1997"]
HEADS, SHARED, WIDTH, SCALE = 4, 2, 16, 0.3
QUERIES, KEYS = [1, 3, 1, 6], [5, 3, 1, 9]  # of four requests: decoding, a prompt, its first token, a prompt's rest


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(padding: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = ((sum(QUERIES) + padding, HEADS), (sum(KEYS) + 7, SHARED), (sum(KEYS) + 7, SHARED))
    query, key, value = (torch.randn(n, heads, WIDTH, generator=g).to(dtype) for n, heads in sizes)
    return query, key, value


def by_definition(query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, sinks_H: Tensor, window: int) -> Tensor:
    """Request by request and token by token: softmax over the keys it sees and a sink whose value is zero."""
    rows = []
    for first_q, first_k, queries, keys in zip(offsets(QUERIES), offsets(KEYS), QUERIES, KEYS, strict=False):
        for t in range(queries):
            seen = slice(0, keys - (queries - 1 - t))
            key, value = (x[first_k : first_k + keys][seen].repeat_interleave(2, 1) for x in (key_KHD, value_KHD))
            key, value = (x[-window:] if window else x for x in (key, value))
            scores_HK = torch.einsum("hd,khd->hk", query_THD[first_q + t], key) * SCALE
            weights = torch.cat([scores_HK, sinks_H[:, None]], 1).softmax(-1)[:, :-1]
            rows.append(torch.einsum("hk,khd->hd", weights, value))
    return torch.stack(rows)


def attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, patch: Any
) -> Callable[[], Tensor]:
    """The function that Transformers calls, with a cache that has the keys already."""
    cu_q, cu_k = (offsets(lengths).to(key.device) for lengths in (QUERIES, KEYS))
    patch.setattr(paged, "_update", lambda *_: (key, value, cu_k, max(KEYS)))
    module: Any = SimpleNamespace(sliding_window=window or None, layer_idx=0, head_dim=WIDTH)
    fields: dict[str, Any] = {"cu_seq_lens_q": cu_q, "read_index": [], "s_aux": sinks, "cache": object()}
    fields |= dict.fromkeys(("max_length_q", "max_seqlen_q"), max(QUERIES))
    query_1HTD = query.transpose(0, 1)[None]
    return lambda: paged.paged_attention(module, query_1HTD, key, value, None, scaling=SCALE, **fields)[0][0]


@pytest.mark.parametrize("most", [0, 512])
@pytest.mark.parametrize("window", [0, 2])
def test_ragged_requests_are_attended_by_definition(monkeypatch: Any, window: int, most: int) -> None:
    monkeypatch.setattr(paged, "_flash", plain_flash)
    monkeypatch.setattr(paged, "_TOKEN_BY_TOKEN", most)
    query, key, value = packed(padding=3)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 4.0])
    got = attention(query, key, value, sinks, window, monkeypatch)()
    torch.testing.assert_close(got[: sum(QUERIES)], by_definition(query, key, value, sinks, window))
    assert not got[sum(QUERIES) :].any()  # padding, of whose rows flash attention may write nothing


@pytest.fixture
def plain(monkeypatch: Any) -> Iterator[None]:
    monkeypatch.setattr(paged, "_flash", plain_flash)
    yield
    transformers.AttentionInterface._global_mapping.pop(paged.NAME, None)


def answers(model: Any, tokenizer: Any, batching: Any, before: Callable[[Any], None]) -> list[str]:
    """Of four sums that are asked at once; ``before`` gets the manager before it starts."""
    settings = transformers.GenerationConfig(
        max_new_tokens=6, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    manager = model.init_continuous_batching(settings, batching)
    before(manager)
    manager.start()
    try:
        prompts = [tokenizer(text)["input_ids"] for text in SUMS_ASKED]
        ids = manager.add_requests(prompts, max_new_tokens=6)
        done: dict[str, str] = {}
        while len(done) < len(ids):
            answer = manager.get_result(timeout=60)
            assert answer is not None, manager.background_thread_status.fatal_error
            done[answer.request_id] = tokenizer.decode(answer.generated_tokens, skip_special_tokens=True)
    finally:
        manager.stop(block=True)
    return [done[i] for i in ids]


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


@pytest.mark.parametrize("most", [0, 3, 64])
@pytest.mark.usefixtures("plain")
def test_only_small_steps_are_captured_and_padded(monkeypatch: Any, most: int) -> None:
    """With Transformers' own runner, and a stand-in for a graph: what a step was computed from."""
    monkeypatch.setattr(paged, "_CAPTURED", most)
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


@pytest.mark.gpu
@pytest.mark.parametrize("most", [0, 512])
@pytest.mark.parametrize("window", [0, 2])
def test_pytorchs_flash_attention_is_what_it_is_taken_for(monkeypatch: Any, window: int, most: int) -> None:
    monkeypatch.setattr(paged, "_TOKEN_BY_TOKEN", most)
    query, key, value = [x.cuda() for x in packed(padding=3, dtype=torch.bfloat16)]
    sinks = torch.tensor([-1.0, 0.0, 2.0, 4.0]).cuda()
    attend = attention(query, key, value, sinks, window, monkeypatch)
    got = attend()
    expected = by_definition(query.float().cpu(), key.float().cpu(), value.float().cpu(), sinks.cpu(), window)
    torch.testing.assert_close(got[: sum(QUERIES)].float().cpu(), expected, rtol=2e-2, atol=2e-2)
    assert not got[sum(QUERIES) :].any()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    graph.replay()
    assert torch.equal(captured, got)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_on_a_gpu(graphs: bool) -> None:
    model, tokenizer = load(CHECKPOINT, device="cuda", dtype=torch.bfloat16)
    runners = []

    def before(manager: Any) -> None:
        paged.use(model)
        if graphs:
            paged.capture_small_steps(manager)
        create = manager._create_batch_processor
        manager._create_batch_processor = lambda: runners.append(create()) or runners[-1]

    for _ in range(3):  # what a graph has computed is computed again
        assert answers(model, tokenizer, paged.batching_config(graphs=graphs, cache_memory=0.02), before) == SUMS_RIGHT
    pairs = runners[0].inputs_and_outputs.io_pairs
    assert any(pair.device_io.graphs._storage for pair in pairs) == graphs
