"""The oracle that checks the reference: experts from the second reading, and their weighted sum in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.families import Fused
from polymoe.problem import Problem
from polymoe.problem.activations import SwiGLU
from polymoe.problem.routing import Routing
from polymoe.verify.second_reading import RawTensor, input_scale, matrix, read_raw

Array = np.ndarray[Any, Any]


def second_expert(checkpoint: Checkpoint, layer: int, e: int) -> dict[str, Array]:
    """Read expert ``e`` of a layer independently, in float64.

    Returns:
        ``gate`` (if any), ``up``, ``down``, their biases and the input scales that were calibrated, by the names of the
        fields of ``Expert``.
    """
    stored = checkpoint.layer(layer)
    fused = stored.arrangement if isinstance(stored.arrangement, Fused) else None
    tensors: dict[str, dict[str, RawTensor]] = {}
    for name, part, suffix in stored.names(checkpoint.files, e):
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
        scale = input_scale(found)
        if scale is not None:
            name = "down_input_scale" if part == "down" else "gate_up_input_scale"
            numbers[name] = np.maximum(scale, numbers.get(name, 0.0))  # gate and up share their input
    if "gate_up" in numbers:
        for name in [n for n in numbers if n in ("gate_up", "gate_up_bias")]:
            both, half = numbers.pop(name), stored.moe.intermediate
            interleaved = fused is not None and fused.order == "interleaved"
            gate, up = (both[0::2], both[1::2]) if interleaved else (both[:half], both[half:])
            if not stored.moe.gated:
                gate, up = both[:0], both
            numbers[name.replace("gate_up", "up")] = up
            if stored.moe.gated:
                numbers[name.replace("gate_up", "gate")] = gate
    return numbers


class Oracle:
    """The weighted sum of experts, ``total_TH`` in float64, to which one expert after another is added."""

    def __init__(self, problem: Problem, x_TH: torch.Tensor, routing: Routing) -> None:
        self._problem, self.total_TH = problem, np.zeros(tuple(x_TH.shape))
        self._x, self._ids, self._weights = (t.double().numpy() for t in (x_TH, *routing))

    def add(self, e: int, w: dict[str, Array]) -> None:
        """Add what expert ``e``, of weights ``w``, contributes to the tokens that are routed to it."""
        t, a = np.nonzero(self._ids == e)
        if not len(t):
            return
        v, weights = self._x[t], self._weights[t, a][:, None]
        on_input = self._problem.weight_on == "input"
        v = v * weights if on_input else v
        up = v @ w["up"].T + w.get("up_bias", 0.0)
        if "gate" in w:
            h = _activate(self._problem, v @ w["gate"].T + w.get("gate_bias", 0.0), up)
        else:
            h = np.maximum(up, 0) ** 2
        y = h @ w["down"].T + w.get("down_bias", 0.0)
        np.add.at(self.total_TH, t, y if on_input else y * weights)


def _activate(problem: Problem, gate: Array, up: Array) -> Array:
    act = problem.activation
    if not isinstance(act, SwiGLU):  # GeGLU: the error function or its tanh approximation, from the definition
        return problem.activation(torch.from_numpy(gate), torch.from_numpy(up)).numpy()  # type: ignore[call-arg]
    limit = np.inf if act.limit is None else act.limit
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-act.alpha * gate)) * (up + act.beta)
