"""Explanation: whether a checkpoint fits a device, how its experts would run there, and how long a token takes.

No weight is loaded. Sizes are those of tensor headers, else of the config; for models of
:mod:`polymoe.checkpoint.known_models` nothing needs to be there at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymoe.backends.base import inputs_of
from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.dense_size import DenseSize
from polymoe.checkpoint.known_models import open_checkpoint
from polymoe.checkpoint.kv_cache import KvCache
from polymoe.common.units import format_bytes, format_count, format_ranges, format_us
from polymoe.errors import ArgumentError
from polymoe.explanation.fit import Fit, Ranks, fit_of
from polymoe.machine import Device, Machine
from polymoe.planning.plan import role_tokens
from polymoe.planning.proof import said, shipped
from polymoe.planning.select import resolve_activations, select
from polymoe.planning.selection import Selection
from polymoe.problem import Dtype, Problem
from polymoe.problem.activation_quantization import ActivationQuantization

if TYPE_CHECKING:
    import torch


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
        fit: memory of one GPU, and of those that serve the model together.
        notes: other remarks, such as unequal tensor-parallel slices.
    """

    name: str
    model_type: str
    device: Device
    rows: tuple[Row, ...]
    fit: Fit
    role: str = "mixed"
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are known, on one rank."""
        return self.fit.weight_bytes

    @property
    def cache_bytes(self) -> int | None:
        """See :attr:`Fit.cache_bytes`."""
        return self.fit.cache_bytes

    @property
    def fits(self) -> bool | None:
        """Whether all weights that are known fit; None for a CPU."""
        return self.fit.fits

    @property
    def cache_tokens(self) -> int | None:
        """See :attr:`Fit.cache_tokens`."""
        return self.fit.cache_tokens

    @property
    def dense(self) -> DenseSize | None:
        """Size of everything outside the experts on one rank; None where it is not known."""
        return self.fit.dense

    @property
    def kv(self) -> KvCache | None:
        """What attention keeps of each token; None where it is not known."""
        return self.fit.kv

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.fit.ranks.tp

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

    @property
    def where(self) -> str:
        """The device, and the sizes of parallel groups."""
        return ", ".join(filter(None, (str(self.device), str(self.fit.ranks))))

    def conclusion(self) -> tuple[str, ...]:
        """The answers to the first questions: does it fit, what runs it, how long does a token take."""
        return tuple(line for line in (self._memory(), *self._backends(), self._time(), self._proof()) if line)

    @property
    def _on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    def _memory(self) -> str:
        if self._on_gpu:
            return self.fit.line()
        more = sum(row.memory_bytes - row.packed_bytes for row in self.rows)
        held = f", and {format_bytes(more)} for dequantized experts" if more > 0 else ""
        return f"{format_bytes(self.weight_bytes)} of {'weights' if self.dense else 'experts'}{held}"

    def _backends(self) -> list[str]:
        lines: dict[str, list[int]] = {}
        for row in self.rows:
            used = dict.fromkeys(
                f"{step.backend} ({said(status, self.device)})" if self._on_gpu else step.backend
                for step, status in row.selection.steps
            )
            text = f"{row.problem.spec.format} experts would use {' and '.join(used)}{self._lead(row.selection)}"
            if not used:
                text = f"no backend runs {row.problem.spec.format} experts here"
            lines.setdefault(text, []).extend(row.layers)
        if len(lines) == 1:
            return list(lines)
        return [f"layers {format_ranges(sorted(layers))}: {text}" for text, layers in lines.items()]

    def _lead(self, selection: Selection) -> str:
        """How much faster the plan is than without the backends that it uses, as a clause."""
        if not self._on_gpu or selection.next_best is None:
            return ""
        name, *factors, measured = selection.next_best
        least, most = (f"{factor:.1f}" for factor in factors)
        how = "measured" if measured else "predicted"
        return (
            f": {how} {least if least == most else f'{least} to {most}'} times as fast as {name}, the next-best backend"
        )

    def _proof(self) -> str:
        """What was proven of kernels that never ran on the GPU, and how to prove them there."""
        models: dict[str, None] = {}
        unproven = []
        for row in self.rows:
            for step, status in row.selection.steps:
                if status == "unrun":
                    problem = replace(row.problem, activations=inputs_of(row.problem, step.config))
                    models |= dict.fromkeys(shipped().elsewhere(step.backend, step.config.kernel_family, problem))
                    unproven.append(row.layers[0])
        if not unproven:
            return ""
        where = f"kernels of the same source passed on {', '.join(models)}" if models else "they ran on no GPU yet"
        command = f"polymoe verify {self.name} --layer {unproven[0]} --out record.jsonl"
        return f"never tested on {self.device.name}: {where}; `{command}` tests one layer on yours, for a record"

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
            "dp": self.fit.ranks.dp,
            "ep": self.fit.ranks.ep,
            **self.fit.to_dict(),
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
        lines = [f"{self.name}: {self.model_type}, on {self.where}", *self.conclusion()]
        for row in self.rows:
            lines += [f"layers {format_ranges(row.layers)}: {row.memory()}", str(row.selection)]
        return "\n".join([*lines, *self.notes])


def explain(
    path: str | Path | Checkpoint,
    *,
    device: str | torch.device | Device | None = None,
    tp: int | tuple[int, int] = 1,
    ep: int | tuple[int, int] = 1,
    dp: int = 1,
    role: str = "mixed",
    backend: str = "auto",
    activations: ActivationQuantization | str = "auto",
    dtype: Dtype = "bf16",
    batch_invariant: bool = False,
    experts: str | None = None,
) -> Explanation:
    """How every layer's experts of a checkpoint would run on a device, and why.

    Args:
        path: a checkpoint's directory, a ``config.json`` alone, or a Hub id. Its files are those of the Hub's cache;
            else the sizes are those that ship with polymoe, if it knows the model; else its config files are fetched.
        device: a GPU's name ("h200", "NVIDIA H200"), an architecture ("sm_120"), "cpu", or None for this machine's
            GPU, or else its CPU.
        tp, dp: sizes of the tensor and data parallel groups of an engine: attention is sliced over ``tp`` GPUs, and
            there are ``tp * dp`` of them. ``tp`` may be ``(rank, size)``.
        ep: size, or ``(rank, size)``, of the expert parallel group, which consists of the same GPUs: it divides their
            number, and each expert is sliced over ``tp * dp / ep``.
        role, backend, activations, batch_invariant: as for :func:`polymoe.load_experts`.
        dtype: of the experts' input.
        experts: a format to which experts in 16 bits would be quantized, as for :func:`polymoe.load`.

    Raises:
        CheckpointError: if the checkpoint or its config cannot be understood.
        ArgumentError: for an unknown name, or for groups that no engine can start, or if they would split a group of
            weights; the sizes that work are listed.
        UnsupportedProblem: if ``backend`` names one and it is rejected.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    if experts is not None:
        checkpoint = Checkpoint(checkpoint.name, checkpoint.files, experts=experts)
    machine = Machine.of(device).shared_by(sum(len(part.layers) for part in checkpoint.parts))
    ranks = Ranks.of(tp, ep, dp)
    ranks.require_heads(checkpoint)
    shard = ranks.experts
    grouped: dict[Problem, list[int]] = {}
    for part, layer in ((p, layer) for p in checkpoint.parts for layer in p.layers):
        try:
            problem = part.problem(
                layer,
                tp=(shard.tp_rank, shard.tp),
                ep=(shard.ep_rank, shard.ep),
                dtype=dtype,
                activations=resolve_activations(part, layer, machine, activations),
                batch_invariant=batch_invariant,
            )
        except ArgumentError as error:
            raise ranks.in_terms(error) from None
        grouped.setdefault(problem, []).append(layer)
    rows = tuple(
        Row(tuple(layers), problem, select(problem, machine, role=role, backend=backend))
        for problem, layers in grouped.items()
    )
    if backend != "auto":
        for row in rows:
            row.selection.require(f"layers {format_ranges(row.layers)}")
    return Explanation(
        str(checkpoint.name),
        checkpoint.model_type,
        machine.device,
        rows,
        fit_of(checkpoint, machine.device, ranks),
        role=role,
        notes=checkpoint.notes(tp=shard.tp),
    )
