"""The backend for CPUs: PyTorch's float32 matrix products, on experts that are dequantized once, at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch

from polymoe.backends.base import BackendBase, Prediction, Runner, RunnerBase, mapped_ids
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.features import ANY, SHARDS, Handled
from polymoe.common.units import format_bytes
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import Activation
from polymoe.problem.verdict import Accepted, Reasons, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments

_LAYOUT = "dequantized"

_FREE_SHARE = 0.9
"""Most of the free memory that layers may take. The rest is for everything that grows while the model runs."""


_HANDLES: Handled = {
    **SHARDS,
    "activation": get_args(Activation),
    "weight_on": ("output", "input"),
    "dtype": ("bf16", "fp16", "fp32"),
    "scales": ANY,
    "spec.bias": ANY,
}


@dataclass(frozen=True, slots=True)
class Torch(BackendBase):
    """Runs every format on a CPU with enough memory for the packed experts and a float32 copy of them."""

    name: str = "torch"
    layouts: tuple[str, ...] = (_LAYOUT,)
    handles = _HANDLES
    """Everything but quantized inputs, and batch-invariant results: torch's order of summation depends on the number
    of rows."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Accept every problem on a CPU, unless the layer does not fit into its share of the free memory."""
        reasons = Reasons()
        on_cpu = reasons.need(machine.device.kind == "cpu", "device", "a CPU", "a GPU")
        free, needed = machine.layer_bytes, LAYOUTS[_LAYOUT].nbytes(problem.spec)
        if on_cpu and free is not None:
            got = f"{format_bytes(free)}, of which {_FREE_SHARE:.0%} may be taken"
            reasons.need(needed <= _FREE_SHARE * free, "free memory", f"{format_bytes(needed)} for each layer", got)
        return reasons.verdict(Accepted())

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        return Config()

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Return the time to read the experts that receive tokens in float32, plus the matrix products at the 16-bit
        rate."""
        c = cost(problem, machine.device, tokens)
        weights = c.active_experts * sum(n * k for n, k in map(problem.spec.matrix_shape, problem.spec.encodings))
        return Prediction(1e6 * 4 * weights / machine.device.bandwidth + c.compute_us, "cost model")

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Return all of them: torch differentiates what runs."""
        return frozenset(("x_TH", "topk_weights_TA", "out"))

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Return a runner with a view of each expert's matrices."""

        def views(name: str) -> tuple[Tensor, ...]:
            return packed.tensors[f"{_LAYOUT}.{name}"].unbind()

        def biases(name: str) -> Sequence[Tensor | None]:
            return views(name) if problem.spec.bias else [None] * problem.spec.local_experts

        return TorchRunner(problem, views("gate_up"), views("down"), biases("gate_up_bias"), biases("down_bias"))


@dataclass(frozen=True, slots=True)
class TorchRunner(RunnerBase):
    """Runs the experts of one layer. One expert's rows are one matrix product; to gather weights for a batched product
    would copy them in every call.

    Attributes:
        problem: what is computed.
        gate_up, down: of each expert, float32 [2F, H] and [H, F].
        gate_up_bias, down_bias: of each expert, float32 [2F] and [H], or None.
    """

    problem: Problem
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    gate_up_bias: Sequence[Tensor | None]
    down_bias: Sequence[Tensor | None]

    options = frozenset(("expert_map",))

    def run(self, call: CallArguments, config: Config) -> None:
        x_TH, ids_TA, weights_TA, out_TH = call.x_TH, call.topk_ids_TA, call.topk_weights_TA, call.out_TH
        if call.expert_map is not None:
            ids_TA = mapped_ids(ids_TA, call.expert_map)
        elif self.problem.spec.first_expert:
            ids_TA = ids_TA - self.problem.spec.first_expert
        compute = self._one if len(x_TH) == 1 else self._many
        if torch.is_autocast_enabled("cpu"):  # it would compute the products in 16 bits
            with torch.autocast("cpu", enabled=False):
                out_TH.copy_(compute(x_TH.float(), ids_TA, weights_TA))
        else:
            out_TH.copy_(compute(x_TH.float(), ids_TA, weights_TA))

    def _one(self, x_1H: Tensor, ids_1A: Tensor, weights_1A: Tensor) -> Tensor:
        """One token: nothing is sorted, and a product is the weighted sum."""
        experts, count = ids_1A.tolist()[0], len(self.down)
        kept = [a for a, e in enumerate(experts) if 0 <= e < count]
        if len(kept) < len(experts):
            if not kept:
                return torch.zeros_like(x_1H)
            experts, weights_1A = [experts[a] for a in kept], weights_1A[:, kept]
        if self.problem.weight_on == "output":
            return weights_1A @ self._experts(experts, [x_1H] * len(experts))
        return self._experts(experts, (weights_1A.T * x_1H).split(1)).sum(0, keepdim=True)

    def _many(self, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """Any number of tokens, whose rows are sorted by expert."""
        ids_R, order_R = ids_TA.flatten().sort(stable=True)
        found, counts = (part.tolist() for part in torch.unique_consecutive(ids_R, return_counts=True))
        groups = [(e, n) for e, n in zip(found, counts, strict=True) if 0 <= e < len(self.down)]
        out_TH = torch.zeros_like(x_TH)
        if not groups:
            return out_TH
        experts, counts_here = zip(*groups, strict=True)
        before = sum(n for e, n in zip(found, counts, strict=True) if e < 0)
        order_R = order_R[before : before + sum(counts_here)]
        token_R, weight_R1 = order_R // ids_TA.shape[1], weights_TA.flatten()[order_R, None]
        x_RH = x_TH[token_R]
        if self.problem.weight_on == "input":
            x_RH = x_RH * weight_R1
        y_RH = self._experts(experts, x_RH.split(counts_here))
        return out_TH.index_add_(0, token_R, y_RH if self.problem.weight_on == "input" else y_RH * weight_R1)

    def _experts(self, experts: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Apply each of ``experts`` to its rows [n, H]; returns the rows of all, [R, H]."""
        linear = torch.nn.functional.linear
        products = [linear(x, self.gate_up[e], self.gate_up_bias[e]) for e, x in zip(experts, rows, strict=True)]
        h_RF = _activated(self.problem.activation, torch.cat(products)).split([len(x) for x in rows])
        return torch.cat([linear(h, self.down[e], self.down_bias[e]) for e, h in zip(experts, h_RF, strict=True)])


def _activated(activation: Activation, gate_up_RF: Tensor) -> Tensor:
    return activation(*gate_up_RF.chunk(2, 1)) if activation.gated is True else activation(gate_up_RF)
