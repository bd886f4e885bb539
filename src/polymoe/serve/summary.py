"""What a server says when it starts: what runs the model, in which memory, and its limits."""

from __future__ import annotations

from typing import Any

import torch

from polymoe.common.units import format_bytes, format_tokens
from polymoe.layer.experts import FusedExperts
from polymoe.serve.app import ModelServer
from polymoe.serve.continuous_batching import ContinuousBatching
from polymoe.serve.metrics import backends


def summary(served: ModelServer, model: Any, **limits: str) -> str:
    """Lines of a name and a value each; ``limits`` are further ones."""
    lines = {"model": served.name, "experts": _experts(model), "memory": _memory(model)}
    context = served.limits.context
    lines["context"] = "unknown" if context is None else f"{context:,} tokens"
    lines["requests"], lines["cache"] = _batching(served)
    lines |= limits
    return "\n".join(f"  {name:<9} {value}" for name, value in lines.items())


def _experts(model: Any) -> str:
    found = [
        f"{backend} ({layout}) in {layers} layer{'s' * (layers != 1)} for {format_tokens(tokens)}"
        for (backend, layout, tokens), layers in backends(model).items()
    ]
    return "; ".join(found) or "Transformers' own, not packed"


def _memory(model: Any) -> str:
    layers = [module for module in model.modules() if isinstance(module, FusedExperts)]
    addresses = {tensor.data_ptr() for layer in layers for tensor in layer.packed.tensors.values()}
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    dense = format_bytes(sum(count for address, count in tensors.items() if address not in addresses))
    experts = format_bytes(sum(layer.packed.nbytes for layer in layers))
    kind = "dequantized" if any(layer.packed.layout == "dequantized" for layer in layers) else "packed"
    said = f"{experts} of {kind} experts and {dense} of other weights on {model.device}"
    if model.device.type != "cuda":
        return said
    free, total = torch.cuda.mem_get_info(model.device)
    return f"{said}; {format_bytes(free)} of {format_bytes(total)} free"


def _batching(served: ModelServer) -> tuple[str, str]:
    batches = served.generation
    if not isinstance(batches, ContinuousBatching):
        return f"one after the other ({served.not_shared})", "grows with each answer"
    graphs = "small steps in CUDA graphs" if batches.batching.graphs else "no CUDA graphs"
    together = f"share forward passes, {graphs}"
    return together, f"{format_bytes(batches.cache_bytes)} for keys and values of about {batches.cache_tokens:,} tokens"
