"""A plug-in of SGLang for tests on a CPU: attention with sinks, as SGLang has it for GPUs; two ranks without NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_sinks: list[Tensor] = []


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.layers.attention import attention_registry, torch_native_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plain = torch_native_backend.scaled_dot_product_attention
    torch_native_backend.scaled_dot_product_attention = lambda *args, **kwargs: (
        _attention(*args, **kwargs, sinks=_sinks[-1]) if _sinks else plain(*args, **kwargs)
    )

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
