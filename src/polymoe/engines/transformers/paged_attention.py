"""Attention for Transformers' continuous batching by PyTorch's own flash attention, with sinks and sliding windows.

Without a flash attention package that fits the model (attention sinks need a special one), Transformers' continuous
batching computes every token against the keys of all requests and masks most of them: work that grows with the square
of the batch. PyTorch has flash attention over sequences of different lengths. It does not support sinks, but returns
the log-sum-exp of each query. A sink is one more term of that sum, so it scales a query's output by
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

NAME = "polymoe_paged"
"""``attn_implementation`` of :func:`paged_attention`."""

_TOKEN_BY_TOKEN = 512
"""Forward passes of at most so many tokens treat each token as a sequence of its own: reading the keys once for each
token then costs less than tiles in which a single query is used."""

CAPTURED = 256
"""Forward passes of at most so many tokens are replayed from CUDA graphs: these are decode steps. Prompts have too many
different lengths for graphs, and keep a GPU busy without them."""

_GRAPH_STEP = 8  # graphs are captured for multiples of so many tokens

_MAX_HEAD_DIM = 256  # of flash attention
_UPDATE: Any = getattr(PagedAttentionCache, "update")  # noqa: B009 - a type checker sees only its wrapper
_TAKES_KWARGS = "kwargs" in inspect.signature(_UPDATE).parameters  # in Transformers 5.17 it does not


def runs_on(model: Any) -> bool:
    """Whether this module can compute every attention of the model: 16 bit, on a GPU since SM80, through Transformers'
    attention interface, without a cap on the softmax."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) or 0 for name in ("head_dim", "qk_head_dim", "v_head_dim")]
    return (
        model.device.type == "cuda"
        and torch.cuda.get_device_capability(model.device) >= (8, 0)
        and model.dtype in (torch.bfloat16, torch.float16)
        and bool(getattr(model, "_supports_attention_backend", False))
        and max(sizes) <= _MAX_HEAD_DIM
        and not any(getattr(config, name, None) for name in ("attn_logit_softcapping", "attention_chunk_size"))
    )


def batching_config(*, graphs: bool, cache_memory: float | None = None) -> ContinuousBatchingConfig:
    """Settings of continuous batching with this attention: the host prepares a step while the GPU runs the last one.

    Args:
        graphs: capture steps in CUDA graphs; see :func:`capture_small_steps`.
        cache_memory: share of the GPU's free memory for keys and values; None is Transformers' default.
    """
    return ContinuousBatchingConfig(
        use_cuda_graph=(graphs, False),
        use_async_batching=True,
        q_padding_interval_size=_GRAPH_STEP if graphs else 0,
        max_memory_percent=cache_memory,
    )


def use(model: Any) -> None:
    """Make a model use this attention. Its continuous batching must be initialized, but not started."""
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)


def capture_small_steps(manager: Any) -> None:
    """Restrict the CUDA graphs of a manager of continuous batching to small steps. The manager must not have started.

    Larger steps are neither captured nor padded to a graph's size.
    """
    create = manager._create_batch_processor

    def create_batch_processor() -> Any:
        processor = create()
        runner = processor.model_runner
        pad = runner.maybe_pad_inputs

        def maybe_pad_inputs(num_q_tokens: int, *args: Any, **kwargs: Any) -> Any:
            # Transformers calls this once for each step, before it reads either attribute.
            runner.pad_inputs = runner.use_cuda_graph_varlen = num_q_tokens <= CAPTURED
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
    """Transformers calls this for an attention layer. Never reads a tensor on the host, so a CUDA graph can capture it.

    Args:
        module: the attention layer.
        query: ``[1, heads, T, D]``, the tokens of all requests one after the other.
        key, value: of the new tokens, ``[1, kv heads, T, D]``; since Transformers 5.24 all that the layer reads,
            ``[1, kv heads, K, D]``, because its models store the new ones themselves.
        attention_mask: must be None.
        scaling: of the scores; None is ``head_dim ** -0.5``.
        kwargs: the cache and the lengths of the requests, from continuous batching.

    Returns:
        ``[1, T, heads, D]``, zero for tokens beyond the last request.

    Raises:
        UnsupportedProblem: outside continuous batching, or for a mask or a capped softmax.
    """
    cache = kwargs.pop("cache", None)
    unknown = attention_mask is not None or kwargs.get("softcap") is not None
    stored = cache is None and isinstance(kwargs.get("cu_seq_lens_k"), Tensor)
    if unknown or (cache is None and not stored):
        raise UnsupportedProblem(
            f'attn_implementation="{NAME}"',
            expected="continuous batching, without a mask or a capped softmax",
            got="a mask or softcap" if unknown else "no paged cache",
        )
    window = getattr(module, "sliding_window", None) or 0
    if window and not stored:
        # If padded for a graph, these layers get as many indices as layers without a window.
        requests, tokens = len(kwargs["cu_seq_lens_q"]) - 1, query.shape[2]
        kwargs["read_index"] = [index[: requests * window + tokens] for index in kwargs["read_index"]]
    cu_q, max_q = kwargs["cu_seq_lens_q"], kwargs["max_length_q" if _TAKES_KWARGS else "max_seqlen_q"]
    if stored:
        key_KHD, value_KHD = (x.squeeze(0).transpose(0, 1) for x in (key, value))
        cu_k, max_k = kwargs["cu_seq_lens_k"], kwargs["max_length_k"]
    else:
        key_KHD, value_KHD, cu_k, max_k = _update(cache, module, key, value, window, kwargs)
    query_THD = query.squeeze(0).transpose(0, 1)
    width = value_KHD.shape[-1]
    if width < key_KHD.shape[-1]:  # flash attention needs keys and values of one width
        value_KHD = nn.functional.pad(value_KHD, [0, key_KHD.shape[-1] - width])
    scale = module.head_dim**-0.5 if scaling is None else scaling
    if len(query_THD) <= _TOKEN_BY_TOKEN:
        out_THD, lse_TH = _by_token(query_THD, key_KHD, value_KHD, cu_q, cu_k, max_k, window, scale)
    else:
        out_THD, lse_HT = _flash(
            query_THD, key_KHD, value_KHD, cu_q, cu_k, None, max_q, max_k, causal=True, window=window, scale=scale
        )
        lse_TH = lse_HT.T
    sinks = kwargs.get("s_aux", getattr(module, "sinks", None))
    if sinks is not None:
        out_THD = out_THD * torch.sigmoid(lse_TH - sinks.float())[..., None].to(out_THD.dtype)
    live = torch.arange(len(out_THD), device=out_THD.device) < cu_q[-1]
    return torch.where(live[:, None, None], out_THD, 0)[None, ..., :width], None


def _update(
    cache: Any, module: Any, key: Tensor, value: Tensor, window: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Store the new keys and values.

    Returns:
        All keys and values that this layer reads, ``[K, kv heads, D]``, the offsets of the requests, and the number of
        keys of the longest one.
    """
    if _TAKES_KWARGS:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        key, value = (x.squeeze(0).transpose(0, 1) for x in (key, value))
        return key, value, kwargs["cu_seq_lens_k"], kwargs["max_length_k"]
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    cu_k, max_k = kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
    if isinstance(cu_k, Mapping):
        kind = "sliding_attention" if window else "full_attention"
        cu_k, max_k = cu_k[kind], max_k[kind]
    return key, value, cu_k, max_k


def _by_token(
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_k: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Each token is a sequence; its queries are the heads that share a key head. Sequences may share keys."""
    (tokens, heads, width), shared = query_THD.shape, key_KHD.shape[1]
    group = heads // shared
    index_T = torch.arange(tokens, device=query_THD.device, dtype=torch.int32)
    request_T = torch.searchsorted(cu_q[1:].contiguous(), index_T, right=True).clamp_(max=len(cu_q) - 2)
    # The last token of a request sees all of its keys, the one before it one key less, and so on.
    end_T = cu_k[request_T + 1] - (cu_q[request_T + 1] - 1 - index_T)
    start_T = cu_k[request_T]
    if window:
        start_T = torch.maximum(start_T, end_T - window)
    # Tokens beyond the last request get no keys.
    used_T = torch.where(index_T < cu_q[-1], end_T - start_T, 0).int()
    starts = torch.cat([start_T, start_T[-1:]]).int()
    queries = query_THD.reshape(tokens, shared, group, width).transpose(1, 2).reshape(tokens * group, shared, width)
    cu_queries = torch.arange(0, (tokens + 1) * group, group, device=queries.device, dtype=torch.int32)
    out, lse = _flash(
        queries, key_KHD, value_KHD, cu_queries, starts, used_T, group, max_k, causal=False, window=0, scale=scale
    )
    out_THD = out.reshape(tokens, group, shared, -1).transpose(1, 2).reshape(tokens, heads, -1)
    return out_THD, lse.reshape(shared, tokens, group).transpose(0, 1).reshape(tokens, heads)


def _flash(
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
    """Outputs ``[T, heads, D]`` and their log-sum-exps ``[heads, T]``.

    Sequence ``i`` has the queries ``cu_q[i]:cu_q[i + 1]``, and the keys ``cu_k[i]:cu_k[i + 1]``, or, with ``used_k``,
    ``used_k[i]`` keys from ``cu_k[i]``.
    """
    flash: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    out, lse, *_ = flash(
        query_THD.contiguous(), key_KHD.contiguous(), value_KHD.contiguous(), cu_q.int(), cu_k.int(), max_q, max_k,
        0.0, causal, False, scale=scale, seqused_k=used_k,
        window_size_left=window - 1 if window else None, window_size_right=0 if causal else None,
    )  # fmt: skip
    return out, lse
