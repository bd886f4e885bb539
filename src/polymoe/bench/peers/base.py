"""A peer, its reasons against a problem, and the stacks of weights that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import Tensor

from polymoe.errors import ArgumentError
from polymoe.formats import Encoding
from polymoe.layouts.natural import Natural
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.activations import Activation, SwiGLU
from polymoe.problem.tensors import ExpertWeights
from polymoe.problem.verdict import Reason, Reasons

PeerCall = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None]
"""Compute x [T, H] with ids [T, A] int32 and weights [T, A] float32: into the output [T, H], or returned."""


@dataclass(frozen=True, slots=True, eq=False)
class Stacks:
    """All experts on the device, in natural order. Gate and up are one stack: gate rows first.

    Attributes:
        gate_up, down: ``codes`` [E, N, ...], ``scales`` and ``global_scale`` by name.
        gate_up_bias_EF, down_bias_EH: biases, or None.
        encoding: of all of them.
    """

    gate_up: dict[str, Tensor]
    down: dict[str, Tensor]
    gate_up_bias_EF: Tensor | None
    down_bias_EH: Tensor | None
    encoding: Encoding

    @classmethod
    def of(cls, weights: ExpertWeights, device: torch.device) -> Stacks:
        """Read the experts of a layer with a gate.

        Raises:
            ArgumentError: if gate and up have global scales of their own, which no peer takes.
        """
        found = Natural().pack(weights, device).tensors
        both: dict[str, Tensor] = {}
        for name in ("codes", "scales", "zero_points", "global_scale"):
            if f"up.{name}" not in found:
                continue
            gate, up = found[f"gate.{name}"], found[f"up.{name}"]
            if name == "global_scale":
                if not torch.equal(gate, up):
                    raise ArgumentError("peers", expected="one global scale for gate and up", got="two")
                both[name] = up
                continue
            byte = gate.dtype.itemsize == 1  # torch concatenates no E8M0
            joined = torch.cat([p.view(torch.uint8) if byte else p for p in (gate, up)], 1)
            both[name] = joined.view(gate.dtype)
        down = {n.partition(".")[2]: t for n, t in found.items() if n.startswith("down.")}
        bias = torch.cat([found["gate_bias"], found["up_bias"]], 1) if "gate_bias" in found else None
        return cls(both, down, bias, found.get("down_bias"), weights.spec.up)


def silu_only(activation: Activation) -> str:
    """SiLU of the gate, times up. A limit is left out; where that matters, the comparison with the reference fails."""
    plain = isinstance(activation, SwiGLU) and (activation.alpha, activation.beta) == (1.0, 0.0)
    return "" if plain else "SwiGLU with alpha 1 and beta 0"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library's layer of experts.

    Attributes:
        name: in ``PEERS`` and in ``--peers``.
        package: the distribution whose version records have.
        formats: that it takes, each with the activations that it goes with.
        prepare: imports it, gives it the weights in its own order, and returns the call. What fails may raise anything.
        activation: what is wrong with an activation, or "".
        bias: whether it takes biases.
        more: adds its other reasons against a problem.
        compiles_at_once: whether several threads may make their first calls at the same time, each of which compiles
            its kernels.
    """

    name: str
    package: str
    formats: Mapping[str, tuple[ActivationQuantization, ...]]
    prepare: Callable[[Problem, Stacks], PeerCall]
    activation: Callable[[Activation], str] = silu_only
    bias: bool = False
    more: Callable[[Problem, Reasons], None] = lambda problem, reasons: None
    compiles_at_once: bool = False

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        """Return every reason why it does not run the problem; it imports nothing."""
        reasons, spec = Reasons(), problem.spec
        name, encodings = spec.format, list(spec.encodings.values())
        if reasons.need(name in self.formats, "format", ", ".join(self.formats), name):
            modes = self.formats[name]
            expected = " or ".join(map(str, modes))
            reasons.need(problem.activations in modes, "activations", expected, problem.activations)
        reasons.need(all(e == encodings[0] for e in encodings), "projections", "one encoding", name)
        reasons.need(not any(e.zero_points for e in encodings), "zero points")
        wrong = self.activation(problem.activation)
        reasons.need(not wrong, "activation", wrong, problem.activation)
        reasons.need(spec.local_experts == spec.experts, "experts of other ranks")
        reasons.need(problem.weight_on == "output", "routing weight on the input")
        reasons.need(problem.dtype == "bf16", "x", "bf16", problem.dtype)
        reasons.need(not problem.batch_invariant, "batch-invariant results")
        reasons.need(self.bias or not spec.bias, "biases")
        self.more(problem, reasons)
        return tuple(reasons.found)


def version_of(peer: Peer) -> str:
    """Version of the peer's distribution; "none" if it is not installed."""
    try:
        return metadata.version(peer.package)
    except metadata.PackageNotFoundError:
        return "none"
