"""Bytes of a loaded model, and bytes that one decode step has to read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polymoe.layer.experts import FusedExperts


def experts_modules(model: Any) -> list[Any]:
    """Return the modules of a Transformers model that are called as experts(x [T, H], ids [T, A], weights [T, A])."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def held_bytes(model: Any, before: int = 0) -> int:
    """Bytes of a model's parameters and buffers, counting each storage once. On a GPU: what PyTorch has allocated
    beyond ``before``."""
    if model.device.type == "cuda":
        return torch.cuda.memory_allocated(model.device) - before
    return _bytes([*model.parameters(), *model.buffers()])


def step_bytes(model: Any, batch: int, context: int, experts_read: float) -> float:
    """Least number of bytes that one decode step reads: every weight outside the experts (of the embedding one row for
    each sequence), ``experts_read`` experts over all layers, and the keys and values of ``context`` tokens."""
    experts = experts_modules(model)
    not_all = {id(t) for module in experts for t in (*module.parameters(), *module.buffers())}
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        not_all.add(id(embedding))
    dense = _bytes([t for t in (*model.parameters(), *model.buffers()) if id(t) not in not_all])
    each = [_bytes_of_one(module) for module in experts]
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    seen = sum(min(context, text.sliding_window) if kind == "sliding_attention" else context for kind in kinds)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 2 * batch * seen * text.num_key_value_heads * head * model.dtype.itemsize
    rows = batch * embedding.shape[1] * embedding.itemsize
    return dense + rows + experts_read * sum(each) / max(len(each), 1) + cache


def _bytes_of_one(module: Any) -> float:
    fused = next((m for m in module.modules() if isinstance(m, FusedExperts)), None)
    if fused is not None:
        return fused.problem.spec.expert_bytes
    parameters = list(module.parameters())
    return _bytes(parameters) / len(parameters[0])


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
