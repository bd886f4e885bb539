"""Attention for continuous batching by PyTorch's own flash attention, for models that Transformers would mask for it.

Without a flash attention package that fits the model (attention sinks need a special one), Transformers' continuous
batching computes every token against the keys of all requests and masks most of them away: work that grows with the
square of the batch. PyTorch has flash attention over sequences of many lengths. It knows no sinks, but returns the
logarithm of each row's sum of exponentials: a sink is one more term of that sum, so it scales a row by
``sigmoid(lse - sink)``.

Interface: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache

from polymoe.errors import UnsupportedProblem

__all__ = ["NAME", "batching", "capture_small_steps", "paged_attention", "runs_on", "use"]

NAME = "polymoe_paged"
"""``attn_implementation`` of :func:`paged_attention`."""

_ROW_BY_ROW = 512
"""Most tokens of a forward pass whose attention treats each token as a sequence of its own: few enough that reading
keys once for each costs less than tiles with one row in use."""

_CAPTURED = 256
"""Most tokens of a forward pass that a CUDA graph replays: what decodes. Prompts come in too many lengths for graphs,
and keep a GPU busy without them."""

_STEP = 8  # graphs are for token counts that are multiples of it

_HEAD_DIM = 256  # flash attention's most
_UPDATE: Any = getattr(PagedAttentionCache, "update")  # noqa: B009 - of which a type checker sees a wrapper
_KWARGS = "kwargs" in inspect.signature(_UPDATE).parameters  # Transformers 5.17's takes them apart

Lengths = tuple[Tensor, Tensor, int, int]  # offsets of queries and of keys, and the most of each in a sequence


def runs_on(model: Any) -> bool:
    """Whether every attention of the model can be computed so: 16 bit, on a GPU since SM80, in Transformers' form."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) or 0 for name in ("head_dim", "qk_head_dim", "v_head_dim")]
    return (
        model.device.type == "cuda"
        and torch.cuda.get_device_capability(model.device) >= (8, 0)
        and model.dtype in (torch.bfloat16, torch.float16)
        and bool(getattr(model, "_supports_attention_backend", False))
        and max(sizes) <= _HEAD_DIM
        and not any(getattr(config, name, None) for name in ("attn_logit_softcapping", "attention_chunk_size"))
    )


def batching(*, graphs: bool, cache_memory: float | None = None) -> ContinuousBatchingConfig:
    """Continuous batching for a model whose attention this will be: a step is prepared while the GPU takes the last.

    Args:
        graphs: capture steps in CUDA graphs; see :func:`capture_small_steps`.
        cache_memory: share of the GPU's free memory for keys and values; None is Transformers' own.
    """
    return ContinuousBatchingConfig(
        use_cuda_graph=(graphs, False),
        use_async_batching=True,
        q_padding_interval_size=_STEP if graphs else 0,
        max_memory_percent=cache_memory,
    )


def use(model: Any) -> None:
    """Let a model's attention be this one. Its continuous batching must have been initialized, and not started."""
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)


def capture_small_steps(manager: Any) -> None:
    """Let a manager of continuous batching that captures CUDA graphs, and has not started, do so with small steps only.

    Larger ones are neither captured nor padded to a size that a graph would have.
    """
    create = manager._create_batch_processor

    def create_batch_processor() -> Any:
        processor = create()
        runner = processor.model_runner
        pad = runner.maybe_pad_inputs

        def maybe_pad_inputs(num_q_tokens: int, *args: Any, **kwargs: Any) -> Any:
            # Transformers asks once for each step, before it looks at either.
            runner.pad_inputs = runner.use_cuda_graph_varlen = num_q_tokens <= _CAPTURED
            return pad(num_q_tokens, *args, **kwargs)

        runner.maybe_pad_inputs = maybe_pad_inputs
        return processor

    manager._create_batch_processor = create_batch_processor


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls for an attention layer: ``[1, T, heads, D]``.

    The query is ``[1, heads, T, D]``, all requests in a row; new keys and values are ``[1, kv heads, T, D]``.

    Nothing here looks at a tensor's values on the host, so a CUDA graph can capture it. Rows beyond the last request
    are zero.

    Raises:
        UnsupportedProblem: outside continuous batching, or for a mask or a capped softmax.
    """
    cache = kwargs.pop("cache", None)
    unknown = attention_mask is not None or kwargs.get("softcap") is not None
    if cache is None or unknown:
        raise UnsupportedProblem(
            f'attn_implementation="{NAME}"', expected="continuous batching, without a mask or a capped softmax",
            got="a mask or softcap" if unknown else "no paged cache",
        )  # fmt: skip
    window = getattr(module, "sliding_window", None) or 0
    if window:
        # Padded for a graph, the indices of these layers are as many as those of layers without a window.
        requests, tokens = len(kwargs["cu_seq_lens_q"]) - 1, query.shape[2]
        kwargs["read_index"] = [index[: requests * window + tokens] for index in kwargs["read_index"]]
    cu_q, max_q = kwargs["cu_seq_lens_q"], kwargs["max_length_q" if _KWARGS else "max_seqlen_q"]
    key_KHD, value_KHD, cu_k, max_k = _update(cache, module, key, value, window, kwargs)
    query_THD = query.squeeze(0).transpose(0, 1)
    width = value_KHD.shape[-1]
    if width < key_KHD.shape[-1]:  # flash attention wants one width
        value_KHD = nn.functional.pad(value_KHD, [0, key_KHD.shape[-1] - width])
    scale = module.head_dim**-0.5 if scaling is None else scaling
    attend = _row_by_row if len(query_THD) <= _ROW_BY_ROW else _by_sequence
    out_THD, lse_TH = attend(query_THD, key_KHD, value_KHD, (cu_q, cu_k, max_q, max_k), window, scale)
    sinks = kwargs.get("s_aux", getattr(module, "sinks", None))
    if sinks is not None:
        out_THD = out_THD * torch.sigmoid(lse_TH - sinks.float())[..., None].to(out_THD.dtype)
    live = torch.arange(len(out_THD), device=out_THD.device) < cu_q[-1]
    return torch.where(live[:, None, None], out_THD, 0)[None, ..., :width], None


def _update(
    cache: Any, module: Any, key: Tensor, value: Tensor, window: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Store the new keys and values; all that this layer reads, ``[K, kv heads, D]``, its offsets and most in a row."""
    if _KWARGS:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        key, value = (x.squeeze(0).transpose(0, 1) for x in (key, value))
        return key, value, kwargs["cu_seq_lens_k"], kwargs["max_length_k"]
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx,
        read_index=kwargs["read_index"], write_index=kwargs["write_index"],
    )  # fmt: skip
    cu_k, max_k = kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
    if isinstance(cu_k, Mapping):
        kind = "sliding_attention" if window else "full_attention"
        cu_k, max_k = cu_k[kind], max_k[kind]
    return key, value, cu_k, max_k


def _by_sequence(
    query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, lengths: Lengths, window: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cu_q, cu_k, max_q, max_k = lengths
    out, lse_HT = _flash(
        query_THD, key_KHD, value_KHD, cu_q, cu_k, None, max_q, max_k, causal=True, window=window, scale=scale
    )
    return out, lse_HT.T


def _row_by_row(
    query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, lengths: Lengths, window: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each token is a sequence whose rows are the query heads that share a key head; keys may overlap."""
    cu_q, cu_k, _, max_k = lengths
    (tokens, heads, width), shared = query_THD.shape, key_KHD.shape[1]
    group = heads // shared
    row_T = torch.arange(tokens, device=query_THD.device, dtype=torch.int32)
    request_T = torch.searchsorted(cu_q[1:].contiguous(), row_T, right=True).clamp_(max=len(cu_q) - 2)
    # The last row of a request sees all of its keys, each one before that one less.
    end_T = cu_k[request_T + 1] - (cu_q[request_T + 1] - 1 - row_T)
    start_T = cu_k[request_T]
    if window:
        start_T = torch.maximum(start_T, end_T - window)
    # Rows beyond the last request get no keys.
    used_T = torch.where(row_T < cu_q[-1], end_T - start_T, 0).int()
    starts = torch.cat([start_T, start_T[-1:]]).int()
    rows = query_THD.reshape(tokens, shared, group, width).transpose(1, 2).reshape(tokens * group, shared, width)
    cu_rows = torch.arange(0, (tokens + 1) * group, group, device=rows.device, dtype=torch.int32)
    out, lse = _flash(
        rows, key_KHD, value_KHD, cu_rows, starts, used_T, group, max_k, causal=False, window=0, scale=scale
    )
    out_THD = out.reshape(tokens, group, shared, -1).transpose(1, 2).reshape(tokens, heads, -1)
    return out_THD, lse.reshape(shared, tokens, group).transpose(0, 1).reshape(tokens, heads)


def _flash(
    query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, cu_q: Tensor, cu_k: Tensor, used_k: Tensor | None,
    max_q: int, max_k: int, *, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows and the logarithms of their sums ``[heads, T]``: sequence ``i`` has the queries from ``cu_q[i]`` up to
    ``cu_q[i + 1]``, and keys from ``cu_k[i]``: ``used_k[i]`` of them, or those up to ``cu_k[i + 1]``."""
    flash: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    out, lse, *_ = flash(
        query_THD.contiguous(), key_KHD.contiguous(), value_KHD.contiguous(), cu_q.int(), cu_k.int(), max_q, max_k,
        0.0, causal, False, scale=scale, seqused_k=used_k,
        window_size_left=window - 1 if window else None, window_size_right=0 if causal else None,
    )  # fmt: skip
    return out, lse
