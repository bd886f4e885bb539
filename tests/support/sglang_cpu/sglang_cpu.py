"""A plug-in of SGLang for tests on a CPU: attention with sinks, as SGLang has it for GPUs; two ranks without NCCL, and
with attention to requests of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_sinks: list[Tensor] = []


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention import attention_registry, torch_native_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plain = torch_native_backend.scaled_dot_product_attention
    torch_native_backend.scaled_dot_product_attention = lambda *args, **kwargs: (
        _attention(*args, **kwargs, sinks=_sinks[-1]) if _sinks else plain(*args, **kwargs)
    )

    # Ranks that attend to tokens of their own pad them to the same number, and count them in page-locked memory.
    torch_native_backend.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda _: 1
    tensor = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)
    dp_attention.memcpy_triton = _copy_rows
    parallel_state.GroupCoordinator.all_gather_into_tensor = _all_gather
    parallel_state.GroupCoordinator.reduce_scatter_tensor = _reduce_scatter

    class WithSinks(torch_native_backend.TorchNativeAttnBackend):
        def forward_extend(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
            with _given(sinks):
                return super().forward_extend(*args, **kwargs)

        def forward_decode(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
            with _given(sinks):
                return super().forward_decode(*args, **kwargs)

    # By the name of a backend that SGLang allows for gpt-oss.
    attention_registry.ATTENTION_BACKENDS["triton"] = WithSinks
    HookRegistry.register("sglang.srt.utils.common.support_triton", lambda *_: False, HookType.REPLACE)
    parallel = "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__"
    HookRegistry.register(parallel, _disabled, HookType.AROUND)


def _copy_rows(to: Tensor, source: Tensor, _: int, offset: Tensor, count: Tensor, offset_in_source: bool) -> None:
    first, rows = int(offset), int(count)
    if offset_in_source:
        to[:rows] = source[first : first + rows]
    else:
        to[first : first + rows] = source[:rows]


def _all_gather(group: Any, to: Tensor, source: Tensor) -> None:
    torch.distributed.all_gather_into_tensor(to, source, group=group.device_group)


def _reduce_scatter(group: Any, to: Tensor, source: Tensor) -> Tensor:
    total = source.clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    return to.copy_(total.chunk(group.world_size)[group.rank_in_group])


@contextlib.contextmanager
def _given(sinks: Tensor | None) -> Iterator[None]:
    if sinks is None:
        yield
        return
    _sinks.append(sinks)
    try:
        yield
    finally:
        _sinks.pop()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    scale: float,
    is_causal: bool,
    sinks: Tensor,
    **_: Any,
) -> Tensor:
    """Attention of [1, heads, L, D], in which each head has one more logit, whose value is 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT).float() * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(value.dtype) @ value


def _disabled(_: Callable[..., None], communicator: Any, *__: Any, **___: Any) -> None:
    communicator.available, communicator.disabled = False, True
