"""What tests of continuous batching share: flash attention by its definition, and settings for a CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor


def plain_flash(
    query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, cu_q: Tensor, cu_k: Tensor, used_k: Tensor | None,
    max_q: int, max_k: int, *, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
