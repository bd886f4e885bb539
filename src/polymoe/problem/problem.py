"""Problem: everything on which a kernel's fitness for a layer's experts depends, and no model's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from polymoe.errors import ArgumentError, nearest, quoted
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import Activation
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec

Dtype = Literal["bf16", "fp16", "fp32"]
"""Of the experts' input and output."""

WeightOn = Literal["output", "input"]
"""What the routing weight multiplies: an expert's output, or its input (Llama-4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One layer's experts as a kernel sees them. Hashable: equal problems share one plan.

    Attributes:
        spec: sizes after sharding, encodings, bias, and the range of experts on this rank.
        activation: the function between the projections, with its constants.
        top_k: experts active per token (A) as the model declares it; calls may use another.
        weight_on: whether the routing weight multiplies each expert's output, or its input (Llama-4).
        dtype: of x and of the result.
        activations: how inputs of the two projections are quantized, if at all; the name of a known way is converted.
        tp, ep: sizes of the tensor and expert parallel groups.
        scales: the measured range of the weights' scales where it is not ordinary; None where it is, or is not known.
        batch_invariant: whether a token's result must be bitwise independent of the rest of the batch.
    """

    spec: ExpertsSpec
    activation: Activation
    top_k: int
    weight_on: WeightOn = "output"
    dtype: Dtype = "bf16"
    activations: ActivationQuantization = UNQUANTIZED
    tp: int = 1
    ep: int = 1
    scales: ScaleRange | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "activations", ActivationQuantization.of(self.activations))
        for name, kind in (("weight_on", WeightOn), ("dtype", Dtype)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ArgumentError(f"Problem.{name}", got=repr(value), hint=nearest(str(value), get_args(kind)))
        for name in ("top_k", "tp", "ep"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"Problem.{name}", expected="at least 1", got=str(getattr(self, name)))
        if not isinstance(self.batch_invariant, bool):
            raise ArgumentError("batch_invariant", expected="True or False", got=quoted(self.batch_invariant))
        if self.activation.gated != self.spec.gated:
            raise ArgumentError(
                "Problem.activation",
                expected="a gated activation exactly where experts have a gate projection",
                got=f"{self.activation.name} with {'a' if self.spec.gated else 'no'} gate projection",
            )

    def __str__(self) -> str:
        s = self.spec
        local = "" if s.local_experts == s.experts else f" ({s.local_experts} from {s.first_expert})"
        parts = [s.format, f"H={s.hidden} F={s.intermediate} E={s.experts}{local} A={self.top_k}", self.activation.name]
        parts += ["bias"] if s.bias else []
        parts += ["weight on input"] if self.weight_on == "input" else []
        parts += [f"x {self.dtype}" + (f" as {self.activations}" if self.activations.quantized else "")]
        parts += [str(self.scales)] if self.scales is not None else []
        parts += ["batch invariant"] if self.batch_invariant else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        parts += [f"ep={self.ep}"] if self.ep > 1 else []
        return ", ".join(parts)
