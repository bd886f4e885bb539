"""What tests of continuous batching share: attention by its definition, ragged requests, sums asked at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from polymoe.engines.transformers import paged_attention as paged

SUMS_ASKED, SUMS_RIGHT = ["123+456=", "12+4=", "700-12=", "998+999="], ["579", "16", "688", "1997"]
HEADS, SHARED, WIDTH, SCALE = 4, 2, 16, 0.3
QUERIES, KEYS = [1, 3, 1, 6], [5, 3, 1, 9]  # of four requests: decoding, a prompt, its first token, a prompt's rest


def plain_flash(
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    used_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What flash attention computes, sequence by sequence; rows of no sequence are left as they come."""
    assert all(cu.dtype == torch.int32 for cu in (cu_q, cu_k))
    out = torch.full((*query_THD.shape[:2], value_KHD.shape[2]), torch.nan, device=query_THD.device)
    lse = torch.full((query_THD.shape[1], len(query_THD)), torch.nan, device=query_THD.device)
    group = query_THD.shape[1] // key_KHD.shape[1]
    for i, (first, last) in enumerate(pairwise(cu_q.tolist())):
        start = int(cu_k[i])
        count = int(cu_k[i + 1]) - start if used_k is None else int(used_k[i])
        assert last - first <= max_q
        assert count <= max_k
        if count == 0:
            out[first:last], lse[:, first:last] = 0, torch.inf
            continue
        key, value = (x[start : start + count].float().repeat_interleave(group, 1) for x in (key_KHD, value_KHD))
        scores_HTK = torch.einsum("thd,khd->htk", query_THD[first:last].float(), key) * scale
        behind = torch.arange(count)[None] - torch.arange(count - (last - first), count)[:, None]
        hidden = (behind > 0) & causal | (behind <= -window if window else torch.zeros_like(behind, dtype=torch.bool))
        scores_HTK.masked_fill_(hidden.to(scores_HTK.device), -torch.inf)
        out[first:last] = torch.einsum("htk,khd->thd", scores_HTK.softmax(-1), value)
        lse[:, first:last] = scores_HTK.logsumexp(-1)
    return out.to(query_THD.dtype), lse


def batching_config(**fields: Any) -> Any:
    pages = "page_size" if hasattr(transformers.ContinuousBatchingConfig(), "page_size") else "block_size"
    return transformers.ContinuousBatchingConfig(**{pages: 16}, **fields)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def ragged(padding: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the four requests, with rows behind them that no request has."""
    g = torch.Generator().manual_seed(0)
    sizes = ((sum(QUERIES) + padding, HEADS), (sum(KEYS) + 7, SHARED), (sum(KEYS) + 7, SHARED))
    query, key, value = (torch.randn(n, heads, WIDTH, generator=g).to(dtype) for n, heads in sizes)
    return query, key, value


def by_definition(query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, sinks_H: Tensor, window: int) -> Tensor:
    """Token by token: softmax over the keys that the token sees and a sink whose value is zero."""
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
    """The function that Transformers calls, with a cache that holds the keys already."""
    cu_q, cu_k = (offsets(lengths).to(key.device) for lengths in (QUERIES, KEYS))
    patch.setattr(paged, "_update", lambda *_: (key, value, cu_k, max(KEYS)))
    module: Any = SimpleNamespace(sliding_window=window or None, layer_idx=0, head_dim=WIDTH)
    fields: dict[str, Any] = {"cu_seq_lens_q": cu_q, "read_index": [], "s_aux": sinks, "cache": object()}
    fields |= dict.fromkeys(("max_length_q", "max_seqlen_q"), max(QUERIES))
    query_1HTD = query.transpose(0, 1)[None]
    return lambda: paged.paged_attention(module, query_1HTD, key, value, None, scaling=SCALE, **fields)[0][0]


def answers(model: Any, tokenizer: Any, batching: Any, before: Callable[[Any], None]) -> list[str]:
    """Answers to four sums at once; ``before`` is called with the manager before it starts."""
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
