"""The oracle that checks the reference: experts from the second reading, and their weighted sum in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from polymoe.activations import SwiGLU
from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.families import Fused
from polymoe.checkpoint.roundtrip import stored_names
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.verify.second_reading import RawTensor, matrix, read_raw

__all__ = ["oracle", "second_expert"]

Array = np.ndarray[Any, Any]


def second_expert(checkpoint: Checkpoint, layer: int, e: int) -> dict[str, Array]:
    """Read expert ``e`` of a layer independently, in float64: gate (if any), up, down, and ``{projection}_bias``."""
    stored = checkpoint.layer(layer)
    fused = stored.arrangement if isinstance(stored.arrangement, Fused) else None
    tensors: dict[str, dict[str, RawTensor]] = {}
    for name, part, suffix in stored_names(checkpoint.files, stored, e):
        raw = read_raw(checkpoint.files.shard_of(name), name)
        if fused and raw.shape[:1] == (stored.moe.experts,):
            raw = raw.item(e)
            raw = raw.transposed() if fused.k_first else raw
        tensors.setdefault(part, {})[suffix] = raw
    numbers: dict[str, Array] = {}
    for part, found in tensors.items():
        bias = found.pop("bias", None)
        awq = stored.parts[part].dialect.name == "awq"
        numbers[part] = matrix(found, stored.parts[part].shape, awq=awq)
        if bias is not None:
            numbers[f"{part}_bias"] = bias.numbers()
    if "gate_up" in numbers:
        for name in [n for n in numbers if n.startswith("gate_up")]:
            both, half = numbers.pop(name), stored.moe.intermediate
            interleaved = fused is not None and fused.order == "interleaved"
            gate, up = (both[0::2], both[1::2]) if interleaved else (both[:half], both[half:])
            if not stored.moe.gated:
                gate, up = both[:0], both
            numbers[name.replace("gate_up", "up")] = up
            if stored.moe.gated:
                numbers[name.replace("gate_up", "gate")] = gate
    return numbers


def oracle(problem: Problem, experts: dict[int, dict[str, Array]], x_TH: torch.Tensor, routing: Routing) -> Array:
    """Compute the weighted sum of the experts in float64, token by token: ``[T, H]``."""
    x, ids, weights = (t.double().numpy() for t in (x_TH, *routing))
    out = np.zeros_like(x)
    for t, a in np.ndindex(*ids.shape):
        w = experts[int(ids[t, a])]
        v = x[t] * (weights[t, a] if problem.weight_on == "input" else 1)
        up = w["up"] @ v + w.get("up_bias", 0.0)
        h = _activate(problem, w["gate"] @ v + w.get("gate_bias", 0.0), up) if "gate" in w else np.maximum(up, 0) ** 2
        y = w["down"] @ h + w.get("down_bias", 0.0)
        out[t] += y if problem.weight_on == "input" else weights[t, a] * y
    return out


def _activate(problem: Problem, gate: Array, up: Array) -> Array:
    act = problem.activation
    if not isinstance(act, SwiGLU):  # GeGLU: the error function or its tanh approximation, from the definition
        return problem.activation(torch.from_numpy(gate), torch.from_numpy(up)).numpy()  # type: ignore[call-arg]
    limit = np.inf if act.limit is None else act.limit
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-act.alpha * gate)) * (up + act.beta)
