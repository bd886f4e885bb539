"""Verify real experts of a checkpoint: their bytes, and every backend's result against the reference and an oracle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polymoe.backends import BACKENDS
from polymoe.backends.reference import run_experts
from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.roundtrip import repacked
from polymoe.errors import ArgumentError, CheckpointNotFound
from polymoe.experts import FusedExperts, resolve_activations
from polymoe.formats import Encoding
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.numerics import TOLERANCE, relative_error
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.runtime import PlanRequest
from polymoe.scale_range import measure_scales
from polymoe.tensors import Expert, ExpertWeights
from polymoe.verdict import Rejected
from polymoe.verify.oracle import oracle, second_expert

__all__ = ["BackendRow", "LayerRow", "Report", "verify"]

MOST_TOKENS = 65_536
"""Largest number of tokens in one call, since their memory grows with experts and width."""


def _exactness(encoding: Encoding) -> float:
    """Relative difference that two correct readings may have: float64 rounding, since they multiply in different
    orders; float32 rounding where a global scale may be stored as a divisor, whose reciprocal is kept in float32."""
    return 1e-6 if encoding.global_scale else 1e-12


@dataclass(frozen=True, slots=True)
class LayerRow:
    """The result for the bytes of one layer.

    Attributes:
        layer, format, experts: what was examined.
        repacked: number of experts whose stored bytes are the same after reading and writing.
        second_reading: number of experts with the same values in an independent reading.
        oracle_error: relative error of the float64 reference against numpy on that reading.
        tolerance: largest such error of a correct reading.
    """

    layer: int
    format: str
    experts: int
    repacked: int
    second_reading: int
    oracle_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether everything agreed."""
        return self.repacked == self.second_reading == self.experts and self.oracle_error <= self.tolerance


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend on one layer: its error against the reference and its time, or why it was rejected."""

    layer: int
    backend: str
    tokens: int = 0
    error: float = 0.0
    tolerance: float = TOLERANCE
    time_us: float = 0.0
    rejected: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; a rejected backend has no error."""
        return bool(self.rejected) or self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, and the device they were measured on.

    Attributes:
        checkpoint, device: the checkpoint and the device.
        layers, backends: one row for each layer, and one for each layer, backend and token count.
        absent: layers of the config whose experts are not in the files, if all layers were requested.
    """

    checkpoint: str
    device: str
    layers: tuple[LayerRow, ...]
    backends: tuple[BackendRow, ...]
    absent: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row is correct."""
        return all(row.ok for row in (*self.layers, *self.backends))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "checkpoint": self.checkpoint,
            "device": self.device,
            "ok": self.ok,
            "absent": list(self.absent),
            "layers": [{**asdict(row), "ok": row.ok} for row in self.layers],
            "backends": [{**asdict(row), "ok": row.ok} for row in self.backends],
        }


def verify(
    path: str | Path,
    *,
    layer: int | None = None,
    tokens: tuple[int, ...] = (1, 16, 256),
    backend: str = "auto",
    device: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check a checkpoint's experts on this machine.

    Each expert of a layer is read, written back and compared byte for byte, and read a second time by code that shares
    nothing with the first; the reference is checked in float64 against numpy; then every backend runs on the packed
    layer and is compared with the reference, which emulates the same activations.

    Args:
        path: a checkpoint's directory or a Hub id. A config and the experts of one layer are enough.
        layer: one layer, or None for every layer whose experts are in the files.
        tokens: token counts to run.
        backend: "auto" for every backend, or a name.
        device: "cpu", "cuda", "cuda:1", or None for the GPU if there is one.
        progress: called with a description of each step.

    Raises:
        CheckpointError: if the checkpoint cannot be read or the layer does not exist.
        UnsupportedProblem: if the named backend is rejected.
        ArgumentError: without token counts, or for one outside 1 to 65536.
    """
    if not tokens or not all(1 <= count <= MOST_TOKENS for count in tokens):
        raise ArgumentError(
            "tokens", expected=f"counts from 1 to {MOST_TOKENS}", got=", ".join(map(str, tokens)) or "none"
        )
    machine = Machine.of(device)
    with Checkpoint.open(path) as checkpoint:
        layers = checkpoint.layers_here if layer is None else (layer,)
        if not layers:
            raise CheckpointNotFound(
                str(path),
                expected="the experts of at least one layer",
                got="none in its files",
                hint="verify needs tensors: name a directory that contains them beside its config.json",
            )
        layer_rows, backend_rows = [], []
        for number in layers:
            progress(f"layer {number}: bytes")
            layer_rows.append(_verify_bytes(checkpoint, number))
            progress(f"layer {number}: backends")
            backend_rows += _verify_backends(checkpoint, number, machine, device, backend, tokens)
        absent = () if layer is not None else tuple(n for n in checkpoint.layers if n not in layers)
        return Report(str(path), str(machine.device), tuple(layer_rows), tuple(backend_rows), absent)


def _verify_bytes(checkpoint: Checkpoint, layer: int) -> LayerRow:
    weights = checkpoint.weights(layer)
    problem = checkpoint.problem(layer, dtype="fp32")
    same_bytes = agreed = 0
    stored = checkpoint.layer(layer)
    for e in range(weights.spec.local_experts):
        expert = weights.expert(e)  # first, since it names the tensor that is wrong
        pairs = list(repacked(checkpoint.files, stored, e))
        same_bytes += all(a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)) for _, a, b in pairs)
        agreed += _same(expert, second_expert(checkpoint, layer, e))
    few = sorted({0, weights.spec.experts // 2, weights.spec.experts - 1})
    x_TH, routing = _call(problem, 4, few)
    got = run_experts(problem, weights, x_TH.double(), routing, torch.float64)
    expected = oracle(problem, {e: second_expert(checkpoint, layer, e) for e in few}, x_TH, routing)
    return LayerRow(
        layer=layer,
        format=weights.spec.format,
        experts=weights.spec.experts,
        repacked=same_bytes,
        second_reading=agreed,
        oracle_error=relative_error(got, torch.from_numpy(expected)),
        tolerance=max(map(_exactness, weights.spec.encodings.values())),
    )


def _verify_backends(
    checkpoint: Checkpoint, layer: int, machine: Machine, device: str | None, backend: str, tokens: tuple[int, ...]
) -> list[BackendRow]:
    mode = resolve_activations(checkpoint, layer, machine, "auto")
    weights = checkpoint.weights(layer)
    problem = replace(
        checkpoint.problem(layer, activations=mode), scales=measure_scales(weights, where=f"layer {layer}")
    )
    selection = select(problem, machine, backend=backend)
    if backend != "auto":
        selection.require(f"layer {layer}")
    rows = []
    for candidate in selection.candidates:
        if backend not in ("auto", candidate.backend):
            continue
        if isinstance(candidate.verdict, Rejected):
            reasons = "; ".join(map(str, candidate.verdict.reasons))
            rows.append(BackendRow(layer, candidate.backend, rejected=reasons))
            continue
        choice = PlanRequest(machine, "mixed", candidate.backend, BACKENDS, LAYOUTS)
        experts = FusedExperts.pack(problem, weights, choice, device=device, check=False, where=f"layer {layer}")
        limit = candidate.verdict.max_tokens
        for count in tokens:
            if limit is None or count <= limit:
                rows.append(_time(experts, weights, layer, candidate.backend, count))
    return rows


def _time(experts: FusedExperts, weights: ExpertWeights, layer: int, backend: str, tokens: int) -> BackendRow:
    x_TH, routing = _call(experts.problem, tokens, range(experts.problem.spec.experts))
    x_TH = x_TH.bfloat16()
    expected = run_experts(experts.problem, weights, x_TH, routing)
    x, ids, w = (t.to(experts.device) for t in (x_TH, *routing))
    got = experts(x, ids, w)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        experts(x, ids, w).cpu()  # the copy waits for the device
        times.append(1e6 * (time.perf_counter() - start))
    return BackendRow(layer, backend, tokens, relative_error(got.cpu(), expected), TOLERANCE, sorted(times)[1])


def _call(problem: Problem, tokens: int, ids: Any) -> tuple[torch.Tensor, Routing]:
    """Draw random tokens, each routed to ``top_k`` different experts of ``ids``."""
    g = torch.Generator().manual_seed(tokens)
    among = torch.tensor(list(ids))
    chosen = torch.rand(tokens, len(among), generator=g).argsort(1)[:, : problem.top_k]
    weights_TA = torch.rand(chosen.shape, generator=g) + 0.5
    return torch.randn(tokens, problem.spec.hidden, generator=g), Routing(among[chosen], weights_TA)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same(expert: Expert, numbers: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Whether the two readings agree in every weight."""
    return expert.projections.keys() <= numbers.keys() and all(
        np.allclose(p.dequantize(torch.float64).numpy(), numbers[name], rtol=_exactness(p.encoding), atol=0)
        for name, p in expert.projections.items()
    )
