"""Which of the models whose sizes ship with polymoe fit a GPU, how fast, and on what they would run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from polymoe.checkpoint.known_models import known_models
from polymoe.errors import ArgumentError
from polymoe.explanation.explanation import Explanation, explain
from polymoe.machine import Device, Machine
from polymoe.planning.proof import ProofStatus, said, weakest


@dataclass(frozen=True)
class ModelOnGpu:
    """A model on one GPU.

    Attributes:
        explanation: of the model on the GPU, for decoding.
        context: tokens that must have room.
    """

    explanation: Explanation
    context: int

    @property
    def name(self) -> str:
        """Its Hub id."""
        return self.explanation.name

    @property
    def format(self) -> str:
        """Of its experts."""
        return " and ".join(dict.fromkeys(row.problem.spec.format for row in self.explanation.rows))

    @property
    def fits(self) -> bool:
        """Whether the weights fit, and the context as far as its size is known."""
        tokens = self.explanation.cache_tokens
        return bool(self.explanation.fits) and (tokens is None or tokens >= self.context)

    @property
    def gpus(self) -> int | None:
        """Number of such GPUs that hold its weights; None if up to 64 do not."""
        if self.explanation.fits:
            return 1
        suffices = self.explanation.fit.suffices
        return suffices.gpus if suffices else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of one request, at most, by predicted or measured times of the experts; None where no backend runs them."""
        times = self.explanation.times
        return times[0].tokens_per_second if times else None

    @cached_property
    def floor_tokens_per_second(self) -> float | None:
        """The same at the GPU's own limits; None where :attr:`tokens_per_second` is."""
        times, rows = self.explanation.times, self.explanation.rows
        if not times or times[0].rest_us is None:
            return None
        return 1e6 / (times[0].rest_us + sum(len(row.layers) * row.selection.floor_us(1) for row in rows))

    @property
    def backends(self) -> tuple[str, ...]:
        """What runs one token."""
        plans = [row.selection.plan for row in self.explanation.rows]
        return tuple(dict.fromkeys(plan.step(1).backend for plan in plans if plan))

    @property
    def proof(self) -> ProofStatus:
        """How far the least proven of its kernels is proven on the GPU."""
        return weakest(status for row in self.explanation.rows for status in row.selection.proofs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = self.explanation
        speeds = (self.tokens_per_second, self.floor_tokens_per_second)
        per_second, floor = (None if speed is None else round(speed, 1) for speed in speeds)
        return {
            "model": self.name,
            "format": self.format,
            "fits": self.fits,
            "gpus": self.gpus,
            "weight_bytes": found.weight_bytes,
            "cache_tokens": found.cache_tokens,
            "tokens_per_second": per_second,
            "floor_tokens_per_second": floor,
            "backends": list(self.backends),
            "proof": self.proof,
            "proven": said(self.proof, found.device),
        }


def models(device: str | Device | None = None, context: int = 8192) -> tuple[ModelOnGpu, ...]:
    """Return every known model on one GPU: those that fit first, the largest of them at the top, then those that need
    the fewest GPUs.

    Args:
        device: a GPU's name or architecture; None for the GPU of this machine.
        context: tokens that must have room beside the weights.

    Raises:
        ArgumentError: for an unknown device, a CPU, or a context below 1.
    """
    machine = Machine.of(device)
    if machine.device.kind != "cuda":
        got = "cpu" if device else "none, and this machine has no GPU"
        raise ArgumentError("device", expected="a GPU, such as rtx4090 or h200", got=got)
    if context < 1:
        raise ArgumentError("context", expected="at least 1 token", got=str(context))
    known = known_models().values()
    found = [ModelOnGpu(explain(k.checkpoint(), device=device, role="decode"), context) for k in known]
    return tuple(sorted(found, key=_order))


def _order(one: ModelOnGpu) -> tuple[bool, int, int, str]:
    weights = one.explanation.weight_bytes
    return (not one.fits, 0, -weights, one.name) if one.fits else (True, one.gpus or 10**6, weights, one.name)
