"""Explanation: the experts of a checkpoint, and how they would run on a device. No weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymoe.activation_quantization import ActivationQuantization
from polymoe.checkpoint import Checkpoint
from polymoe.experts import resolve_activations
from polymoe.machine import Device, Machine
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Dtype, Problem

__all__ = ["Explanation", "Row", "explain", "layer_ranges"]


@dataclass(frozen=True, slots=True)
class Row:
    """Layers that share one problem, and the selection for it."""

    layers: tuple[int, ...]
    problem: Problem
    selection: Selection

    @property
    def packed_bytes(self) -> int:
        """Bytes of these layers' experts as stored, on this rank."""
        return len(self.layers) * self.problem.spec.local_experts * self.problem.spec.expert_bytes

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the same experts as 16-bit floats."""
        return len(self.layers) * self.problem.spec.dequantized_bytes


@dataclass(frozen=True, slots=True)
class Explanation:
    """A whole checkpoint's experts on one device; ``print()`` it, or ``.to_dict()`` for JSON.

    Attributes:
        name: the checkpoint as it was named.
        model_type: its family's name in the config.
        device: the device that it was explained for.
        rows: layers that share a problem, in order.
        notes: other remarks, such as unequal tensor-parallel slices.
    """

    name: str
    model_type: str
    device: Device
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "checkpoint": self.name,
            "model_type": self.model_type,
            "device": str(self.device),
            "notes": list(self.notes),
            "rows": [
                {
                    "layers": list(row.layers),
                    "packed_bytes": row.packed_bytes,
                    "dequantized_bytes": row.dequantized_bytes,
                    **row.selection.to_dict(),
                }
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.model_type} on {self.device}"]
        for row in self.rows:
            lines += [
                f"layers {layer_ranges(row.layers)}: {row.packed_bytes / 2**20:.1f} MiB packed",
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
        path: a checkpoint's directory, a ``config.json`` alone, or a Hub id (only its config files are fetched).
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
    machine = Machine.of(device)
    # Local files are read, because tensors take precedence over the config; from the Hub only configs are fetched.
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path, config_only=not Path(path).is_dir())
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
            row.selection.require(f"layers {layer_ranges(row.layers)}")
    return Explanation(str(checkpoint.name), checkpoint.model_type, machine.device, rows, checkpoint.notes(tp=tp))


def layer_ranges(layers: Sequence[int]) -> str:
    """Layer numbers as ranges: ``(3, 4, 5, 9)`` gives ``"3-5, 9"``; ``(1, 3, 5, 7)`` gives ``"1-7 by 2"``."""
    texts, rest = [], list(layers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        count = next((i for i, layer in enumerate(rest) if layer != rest[0] + i * step), len(rest))
        if step > 1 and count < 3:
            count = 1  # two numbers make no pattern
        run, rest = rest[:count], rest[count:]
        texts.append(str(run[0]) if count == 1 else f"{run[0]}-{run[-1]}" + (f" by {step}" if step > 1 else ""))
    return ", ".join(texts)
