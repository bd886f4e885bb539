"""Verify real experts of a checkpoint: their bytes, and every backend's result against the reference and an oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polymoe.backends import BACKENDS
from polymoe.backends.base import inputs_of
from polymoe.backends.reference import run_experts
from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, CheckpointNotFound
from polymoe.formats import Encoding
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.layouts.pack_check import difference
from polymoe.machine import Machine
from polymoe.planning.select import require_backend, resolve_activations, select
from polymoe.problem import Problem
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.scale_range import measure_scales
from polymoe.problem.tensors import Expert
from polymoe.problem.verdict import Rejected
from polymoe.verify.oracle import Oracle, second_expert
from polymoe.verify.report import BackendRow, LayerRow, Report

__all__ = ["BackendRow", "LayerRow", "Report", "verify"]

MOST_TOKENS = 65_536
"""Largest number of tokens in one call, since their memory grows with experts and width."""


def _exactness(encoding: Encoding) -> float:
    """Relative difference that two correct readings may have: float64 rounding, since they multiply in different
    orders; float32 rounding where a global scale may be stored as a divisor, whose reciprocal is kept in float32."""
    return 1e-6 if encoding.global_scale else 1e-12


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
    nothing with the first: weights, biases and input scales. From this second reading numpy computes an oracle in
    float64, with which the reference is compared in float64, and then every backend on the packed layer. Where the
    experts' inputs are quantized (on a GPU), backends are compared with the reference, which emulates that.

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
        ArgumentError: without token counts, for one outside 1 to 65536, or for an unknown backend.
    """
    if not tokens or not all(1 <= count <= MOST_TOKENS for count in tokens):
        raise ArgumentError(
            "tokens", expected=f"counts from 1 to {MOST_TOKENS}", got=", ".join(map(str, tokens)) or "none"
        )
    require_backend(backend, BACKENDS)
    machine = Machine.of(device)
    with Checkpoint.open(path) as checkpoint:
        wanted = {part: part.layers_here if layer is None else (layer,) for part in checkpoint.parts}
        if layer is not None and len(wanted) > 1:
            wanted = {part: numbers for part, numbers in wanted.items() if layer in part.layers} or wanted
        if not any(wanted.values()):
            raise CheckpointNotFound(
                str(path),
                expected="the experts of at least one layer",
                got="none in its files",
                hint="verify needs tensors: name a directory that contains them beside its config.json",
            )
        layer_rows, backend_rows = [], []
        for part, number in ((p, number) for p, numbers in wanted.items() for number in numbers):
            progress(f"layer {number}: bytes")
            mode = resolve_activations(part, number, machine, "auto")
            problem = part.problem(number, activations=mode)
            everyone = range(problem.spec.experts)
            calls = {count: _call(problem, count, everyone, torch.bfloat16) for count in tokens}
            oracles = {} if mode.quantized else {n: Oracle(problem, *call) for n, call in calls.items()}
            layer_rows.append(_verify_bytes(part, number, oracles.values()))
            progress(f"layer {number}: backends")
            expected = {n: torch.from_numpy(oracle.total_TH) for n, oracle in oracles.items()}
            backend_rows += _verify_backends(part, problem, number, machine, device, backend, calls, expected)
        absent = (
            ()
            if layer is not None
            else tuple(n for part, numbers in wanted.items() for n in part.layers if n not in numbers)
        )
        return Report(str(path), str(machine.device), tuple(layer_rows), tuple(backend_rows), absent)


def _verify_bytes(checkpoint: Checkpoint, layer: int, oracles: Iterable[Oracle]) -> LayerRow:
    """Check every expert's bytes, and add its second reading to ``oracles``."""
    weights = checkpoint.weights(layer)
    problem = checkpoint.problem(layer, dtype="fp32")
    few = sorted({0, weights.spec.experts // 2, weights.spec.experts - 1})
    x_TH, routing = _call(problem, 4, few, torch.float32)
    oracle = Oracle(problem, x_TH, routing)
    same_bytes = agreed = 0
    stored = checkpoint.layer(layer)
    for e in range(weights.spec.experts):
        expert = weights.expert(e)  # first, since its errors name the tensor
        pairs = list(stored.rewritten(checkpoint.files, e))
        same_bytes += all(a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)) for _, a, b in pairs)
        numbers = second_expert(checkpoint, layer, e)
        agreed += _same(expert, numbers)
        for some in (oracle, *oracles):
            some.add(e, numbers)
    got = run_experts(problem, weights, x_TH.double(), routing, torch.float64)
    return LayerRow(
        layer=layer,
        format=weights.spec.format,
        experts=weights.spec.experts,
        repacked=same_bytes,
        second_reading=agreed,
        oracle_error=relative_error(got, torch.from_numpy(oracle.total_TH)),
        tolerance=max(map(_exactness, weights.spec.encodings.values())),
    )


def _verify_backends(
    checkpoint: Checkpoint,
    problem: Problem,
    layer: int,
    machine: Machine,
    device: str | None,
    backend: str,
    calls: Mapping[int, tuple[torch.Tensor, Routing]],
    oracles: Mapping[int, torch.Tensor],
) -> list[BackendRow]:
    """Run ``calls``, by token count, on every backend, and compare with ``oracles``, or the reference without them."""
    weights = checkpoint.weights(layer)
    problem = replace(problem, scales=measure_scales(weights))
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
        pairs = zip(weights, experts.weights, strict=True)
        differing = sum(difference(read.to(experts.device), packed) is not None for read, packed in pairs)
        limit = candidate.verdict.max_tokens
        plan = experts.explain().require()
        for count, (x_TH, routing) in calls.items():
            if limit is not None and count > limit:
                continue
            config = plan.step(count).config
            mode = inputs_of(problem, config)
            emulated = replace(experts.problem, activations=mode)
            expected = oracles[count] if oracles else run_experts(emulated, weights, x_TH, routing)
            error, time_us = _run(experts, x_TH, routing, expected)
            row = BackendRow(
                layer=layer,
                backend=candidate.backend,
                tokens=count,
                against="oracle" if oracles else "reference",
                error=error,
                tolerance=mode.tolerance,
                differing=differing,
                time_us=time_us,
                family=config.kernel_family,
                format=problem.spec.format,
                activations=str(mode),
            )
            rows.append(row)
    return rows


def _run(experts: FusedExperts, x_TH: torch.Tensor, routing: Routing, expected: torch.Tensor) -> tuple[float, float]:
    """Return the relative error of a call, and the median time of three, in microseconds."""
    call = tuple(t.to(experts.device) for t in (x_TH, *routing))
    got = experts(*call)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        experts(*call).cpu()  # the copy waits for the device
        times.append(1e6 * (time.perf_counter() - start))
    return relative_error(got.cpu(), expected), sorted(times)[1]


def _call(problem: Problem, tokens: int, ids: Iterable[int], dtype: torch.dtype) -> tuple[torch.Tensor, Routing]:
    """Draw random tokens, each routed to ``top_k`` different experts of ``ids``."""
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    cpu["generator"] = torch.Generator("cpu").manual_seed(tokens)
    among = torch.tensor(list(ids), device="cpu")
    chosen = torch.rand(tokens, len(among), **cpu).argsort(1)[:, : problem.top_k]
    weights_TA = torch.rand(chosen.shape, **cpu) + 0.5
    x_TH = torch.randn(tokens, problem.spec.hidden, **cpu).to(dtype)
    return x_TH, Routing(among[chosen], weights_TA)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same(expert: Expert, numbers: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Whether the two readings agree in every weight, bias and input scale, and in which of them there are."""
    found = {name: (p.dequantize(torch.float64), _exactness(p.encoding)) for name, p in expert.projections.items()}
    found |= {name: (v.double(), 1e-6 if name.endswith("scale") else 0.0) for name, v in expert.vectors.items()}
    return found.keys() == numbers.keys() and all(
        np.allclose(values.numpy(), numbers[name], rtol=exactness, atol=0)
        for name, (values, exactness) in found.items()
    )
