"""Explanation: whether a checkpoint fits a device, how its experts would run there, and how long a token takes.

No weight is loaded. Sizes are those of tensor headers, else of the config; for models of
:mod:`polymoe.checkpoint.known_models` nothing needs to be there at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.dense_size import DenseSize
from polymoe.checkpoint.known_models import dense_size_of, open_checkpoint
from polymoe.checkpoint.kv_cache import KvCache, kv_cache
from polymoe.checkpoint.shard import Shard
from polymoe.common.units import format_bytes, format_count, format_ranges, format_us
from polymoe.errors import ArgumentError
from polymoe.layer.experts import resolve_activations
from polymoe.machine import Device, Machine
from polymoe.planning.plan import role_tokens
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Dtype, Problem
from polymoe.problem.activation_quantization import ActivationQuantization

__all__ = ["RESERVE", "Explanation", "ModelTime", "Row", "explain"]

RESERVE = 0.05
"""Share of the device's memory for the CUDA context, workspaces and activations."""


@dataclass(frozen=True, slots=True)
class Row:
    """Layers that share one problem, and the selection for it."""

    layers: tuple[int, ...]
    problem: Problem
    selection: Selection

    @property
    def packed_bytes(self) -> int:
        """Bytes of these layers' experts as stored, on this rank."""
        return len(self.layers) * self.problem.spec.local_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the same experts in the planned layout, or as stored where it is not known."""
        each = self.selection.layout_bytes
        return self.packed_bytes if each is None else len(self.layers) * each

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the same experts as 16-bit floats."""
        return len(self.layers) * self.problem.spec.dequantized_bytes

    def memory(self) -> str:
        """The size of these layers' experts as stored and, on a CPU, in memory, as text."""
        plan, packed = self.selection.plan, f"{format_bytes(self.packed_bytes)} packed"
        if plan is None or self.selection.machine.device.kind != "cpu" or self.memory_bytes == self.packed_bytes:
            return packed
        return f"{packed}, {format_bytes(self.memory_bytes)} in memory (layout {plan.layout})"

    def sizes(self) -> dict[str, Any]:
        """One layer's experts on this rank as plain values, for JSON."""
        spec = self.problem.spec
        return {
            "format": spec.format,
            "hidden": spec.hidden,
            "intermediate": spec.intermediate,
            "experts": spec.experts,
            "first_expert": spec.first_expert,
            "local_experts": spec.local_experts,
            "top_k": self.problem.top_k,
            "activation": self.problem.activation.name,
            "bias": spec.bias,
            "input": str(self.problem.activations),
        }


@dataclass(frozen=True, slots=True)
class ModelTime:
    """Predicted time of one call of the whole model on one rank, without attention's cache and communication.

    Attributes:
        tokens: in the call.
        experts_us: in the experts of all layers.
        rest_us: least time for all other weights, at the device's rates; None where their size is not known, and for
            prefill, in which not every weight meets every token.
    """

    tokens: int
    experts_us: float
    rest_us: float | None = None

    @property
    def total_us(self) -> float | None:
        """The least time of the call; None where ``rest_us`` is."""
        return None if self.rest_us is None else self.experts_us + self.rest_us

    @property
    def tokens_per_second(self) -> float | None:
        """At most; None where ``rest_us`` is."""
        return None if self.total_us is None else 1e6 * self.tokens / self.total_us

    def to_dict(self) -> dict[str, float | None]:
        """Plain values, for JSON."""
        names = ("tokens", "experts_us", "rest_us", "total_us", "tokens_per_second")
        return {name: None if (v := getattr(self, name)) is None else round(v, 2) for name in names}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A whole checkpoint's experts on one device; ``print()`` it, or ``.to_dict()`` for JSON.

    Attributes:
        name: the checkpoint as it was named.
        model_type: its family's name in the config.
        device: the device that it was explained for.
        rows: layers that share a problem, in order.
        role: of the token counts for which it was planned.
        dense: size of everything outside the experts on one of ``tp`` ranks; None where it is not known.
        kv: what attention keeps of each token; None where it is not known.
        tp: tensor parallel size.
        tp_that_fits: a tensor parallel size at which the model fits the device: the least power of two up to 64, else
            the least other size; None if none does, or if the model fits already.
        notes: other remarks, such as unequal tensor-parallel slices.
    """

    name: str
    model_type: str
    device: Device
    rows: tuple[Row, ...]
    role: str = "mixed"
    dense: DenseSize | None = None
    kv: KvCache | None = None
    tp: int = 1
    tp_that_fits: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are known, on one rank."""
        return sum(row.packed_bytes for row in self.rows) + (self.dense.total_bytes if self.dense else 0)

    @property
    def cache_bytes(self) -> int | None:
        """Device memory that is left for the KV cache beside weights and :data:`RESERVE`; None for a CPU. Negative
        where the weights do not fit."""
        return round(self.device.memory_bytes * (1 - RESERVE)) - self.weight_bytes if self._on_gpu else None

    @property
    def fits(self) -> bool | None:
        """Whether all weights that are known fit; None for a CPU."""
        return None if self.cache_bytes is None else self.cache_bytes >= 0

    @property
    def cache_tokens(self) -> int | None:
        """Tokens of context that the KV cache has room for in 16 bit; None where either size is not known."""
        each = self.kv.token_bytes(self.tp) if self.kv else 0
        if not each or self.dense is None or self.cache_bytes is None:
            return None
        return max(self.cache_bytes, 0) // each

    @property
    def times(self) -> tuple[ModelTime, ...]:
        """Predicted time at each of the role's token counts; empty for a CPU and where experts have no plan."""
        predictions = [dict(row.selection.times) for row in self.rows] if self._on_gpu else []
        counts = [t for t in role_tokens(self.role) if predictions and all(t in p for p in predictions)]
        layers = [len(row.layers) for row in self.rows]
        return tuple(
            ModelTime(t, sum(n * p[t].time_us for n, p in zip(layers, predictions, strict=True)), self._rest_us(t))
            for t in counts
        )

    def _rest_us(self, tokens: int) -> float | None:
        """Least time of a decode step for all weights outside the experts: to read them, or to multiply by them."""
        if self.dense is None or tokens not in role_tokens("decode"):
            return None
        reading = self.dense.read_bytes / self.device.bandwidth
        multiplying = self.dense.read_bytes * tokens / self.device.flops_16bit  # two operations for each two bytes
        return 1e6 * max(reading, multiplying)

    def conclusion(self) -> tuple[str, ...]:
        """The answers to the first questions: does it fit, what runs it, how long does a token take."""
        return tuple(line for line in (self._memory(), *self._backends(), self._time()) if line)

    @property
    def _on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    def _memory(self) -> str:
        weights, room = format_bytes(self.weight_bytes), self.cache_bytes
        what = "weights" if self.dense else "experts"
        if room is None:
            more = sum(row.memory_bytes - row.packed_bytes for row in self.rows)
            held = f", and {format_bytes(more)} for dequantized experts" if more > 0 else ""
            return f"{weights} of {what}{held}"
        beyond = "" if self.dense else "; a config does not contain the size of the other weights"
        where = f"{self.tp} x {self.device.name}" if self.tp > 1 else self.device.name
        each = " on each" if self.tp > 1 else ""
        memory = format_bytes(self.device.memory_bytes)
        if room >= 0:
            left = format_bytes(room)
            if not self.dense:
                on = f"each of {where}" if self.tp > 1 else where
                return f"{weights} of experts leave {left} on {on} for everything else{beyond}"
            return f"fits on {where}: {weights} of weights leave {left}{each} for the KV cache{self._context()}"
        fits = f"--tp {self.tp_that_fits} does" if self.tp_that_fits else "no tensor parallel size up to 64 does"
        return f"does not fit on {where}: {what} take {weights} of {memory}{each}; {fits}{beyond}"

    def _context(self) -> str:
        """How much context that is, as a clause."""
        if self.kv is None or self.cache_tokens is None:
            return ""
        most = f" (the model's longest context is {self.kv.max_tokens:,})" if self.kv.max_tokens else ""
        return f", {format_count(self.cache_tokens)} tokens in 16 bits{most}"

    def _backends(self) -> list[str]:
        lines: dict[str, list[int]] = {}
        for row in self.rows:
            s = row.selection
            plan = s.plan
            if plan is None:
                text = f"no backend runs {row.problem.spec.format} experts here"
            else:
                proofs = zip(plan.steps, s.proofs, strict=True)
                said = dict.fromkeys(
                    f"{step.backend} ({status} on {self.device.name})" if self._on_gpu else step.backend
                    for step, status in proofs
                )
                text = f"{row.problem.spec.format} experts run on backend {' and '.join(said)}"
            lines.setdefault(text, []).extend(row.layers)
        if len(lines) == 1:
            return list(lines)
        return [f"layers {format_ranges(sorted(layers))}: {text}" for text, layers in lines.items()]

    def _time(self) -> str:
        if not self.times or self.times[0].tokens != 1:
            return ""
        alone, layers = self.times[0], sum(len(row.layers) for row in self.rows)
        each = format_us(alone.experts_us / layers)
        experts = f"{format_us(alone.experts_us)} in the experts ({each} in each of {layers} layers)"
        if alone.rest_us is None or alone.total_us is None or alone.tokens_per_second is None:
            return f"one token takes {experts}"
        most = format_count(round(alone.tokens_per_second))
        return (
            f"one token takes at least {format_us(alone.total_us)} (at most {most} tokens/s): {experts}"
            f" and {format_us(alone.rest_us)} to read all other weights"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "checkpoint": self.name,
            "model_type": self.model_type,
            "device": str(self.device),
            "conclusion": list(self.conclusion()),
            "tp": self.tp,
            "fits": self.fits,
            "memory_bytes": self.device.memory_bytes or None,
            "weight_bytes": self.weight_bytes,
            "dense_bytes": self.dense.total_bytes if self.dense else None,
            "cache_bytes": self.cache_bytes,
            "cache_tokens": self.cache_tokens,
            "cache_bytes_per_token": self.kv.token_bytes(self.tp) if self.kv else None,
            "max_context": self.kv.max_tokens if self.kv else None,
            "tp_that_fits": self.tp_that_fits,
            "times": [time.to_dict() for time in self.times],
            "notes": list(self.notes),
            "rows": [
                {
                    "layers": list(row.layers),
                    **row.sizes(),
                    "packed_bytes": row.packed_bytes,
                    "memory_bytes": row.memory_bytes,
                    "dequantized_bytes": row.dequantized_bytes,
                    **row.selection.to_dict(),
                }
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.model_type}, on {self.device}", *self.conclusion()]
        for row in self.rows:
            lines += [
                f"layers {format_ranges(row.layers)}: {row.memory()}",
                str(row.selection),
            ]
        return "\n".join([*lines, *self.notes])


def explain(
    path: str | Path | Checkpoint,
    *,
    device: str | Device | None = None,
    tp: int | tuple[int, int] = 1,
    ep: int | tuple[int, int] = 1,
    role: str = "mixed",
    backend: str = "auto",
    activations: ActivationQuantization | str = "auto",
    dtype: Dtype = "bf16",
    batch_invariant: bool = False,
) -> Explanation:
    """How every layer's experts of a checkpoint would run on a device, and why.

    Args:
        path: a checkpoint's directory, a ``config.json`` alone, or a Hub id. Its files are those of the Hub's cache;
            else the sizes are those that ship with polymoe, if it knows the model; else its config files are fetched.
        device: a GPU's name ("h200", "NVIDIA H200"), an architecture ("sm_120"), "cpu", or None for this machine's
            GPU, or else its CPU.
        tp, ep: size, or ``(rank, size)``, of the tensor and expert parallel group.
        role, backend, activations, batch_invariant: as for :func:`polymoe.load_experts`.
        dtype: of the experts' input.

    Raises:
        CheckpointError: if the checkpoint or its config cannot be understood.
        ArgumentError: for an unknown name, or if ``tp`` would split a group; the sizes that work are listed.
        UnsupportedProblem: if ``backend`` names one and it is rejected.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    machine = Machine.of(device).shared_by(len(checkpoint.layers))
    grouped: dict[Problem, list[int]] = {}
    for layer in checkpoint.layers:
        mode = resolve_activations(checkpoint, layer, machine, activations)
        problem = checkpoint.problem(
            layer, tp=tp, ep=ep, dtype=dtype, activations=mode, batch_invariant=batch_invariant
        )
        grouped.setdefault(problem, []).append(layer)
    rows = tuple(
        Row(tuple(layers), problem, select(problem, machine, role=role, backend=backend))
        for problem, layers in grouped.items()
    )
    if backend != "auto":
        for row in rows:
            row.selection.require(f"layers {format_ranges(row.layers)}")
    size, dense = Shard.of(tp, ep).tp, dense_size_of(checkpoint)
    found = Explanation(
        str(checkpoint.name),
        checkpoint.model_type,
        machine.device,
        rows,
        role=role,
        dense=dense and dense.sliced(size),
        kv=kv_cache(checkpoint.config),
        tp=size,
        notes=checkpoint.notes(tp=tp),
    )
    if (found.cache_bytes or 0) >= 0:
        return found
    return replace(found, tp_that_fits=_tp_that_fits(checkpoint, machine.device, dense, ep))


def _tp_that_fits(
    checkpoint: Checkpoint, device: Device, dense: DenseSize | None, ep: int | tuple[int, int]
) -> int | None:
    """Return a tensor parallel size at which all weights fit: the least power of two up to 64, else the least other
    size; None if there is none."""
    for size in (2, 4, 8, 16, 32, 64, *range(3, 64)):
        try:
            specs = [checkpoint.spec(layer, tp=size, ep=ep) for layer in checkpoint.layers]
        except ArgumentError:
            continue
        experts = sum(s.local_bytes for s in specs)
        if experts + (dense.sliced(size).total_bytes if dense else 0) <= device.memory_bytes * (1 - RESERVE):
            return size
    return None
