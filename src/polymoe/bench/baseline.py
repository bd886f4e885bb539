"""The baseline of every benchmark: experts dequantized to bfloat16 once, multiplied by torch's ``grouped_mm``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from polymoe.problem.verdict import Accepted, Reasons, Verdict

NAME = "torch-dequantized"
"""The baseline's name in tables and records, beside the names of backends."""

BASELINE_TOLERANCE = 1.2e-2
"""Largest relative error, twice a backend's: weights and all intermediate results are rounded to bfloat16."""

_CAPTURABLE = (90, 100, 103)  # where torch has kernels; elsewhere it loops and reads group sizes on the host


@dataclass(frozen=True, slots=True, eq=False)
class Dequantized:
    """All experts in bfloat16 and natural order: [E, 2F, H] (or [E, F, H]) and [E, H, F]; biases likewise, or None."""

    gate_up_EFH: Tensor
    down_EHF: Tensor
    gate_up_bias_EF: Tensor | None
    down_bias_EH: Tensor | None


def check(problem: Problem, machine: Machine, free_bytes: int | None) -> Verdict:
    """Whether the baseline can run the problem with ``free_bytes`` of free memory (None: unknown)."""
    reasons, spec = Reasons(), problem.spec
    reasons.need(problem.dtype == "bf16", "x", "bf16", problem.dtype)
    reasons.need(not problem.batch_invariant, "batch-invariant results")
    for name, size in (("H", spec.hidden), ("F", spec.intermediate)):
        reasons.need(size % 8 == 0, name, "a multiple of 8, for rows of 16 bytes", size)
    wanted = spec.dequantized_bytes
    if free_bytes is not None:
        reasons.need(wanted < 0.9 * free_bytes, "memory", f"{wanted / 2**30:.1f} GiB", f"{free_bytes / 2**30:.1f} GiB")
    return reasons.verdict(Accepted(capturable=machine.device.sm in _CAPTURABLE))


def dequantize(weights: ExpertWeights) -> Dequantized:
    """Return the experts in bfloat16, on their own device."""
    gate_up, down = weights.dequantize(torch.bfloat16)
    if not weights.spec.bias:
        return Dequantized(gate_up, down, None, None)
    vectors = [expert.vectors for expert in weights]
    names = [n for n in ("gate_bias", "up_bias") if n in vectors[0]]
    return Dequantized(
        gate_up,
        down,
        torch.stack([torch.cat([v[n] for n in names]) for v in vectors]).bfloat16(),
        torch.stack([v["down_bias"] for v in vectors]).bfloat16(),
    )


def run(problem: Problem, weights: Dequantized, x_TH: Tensor, routing: Routing, out_TH: Tensor) -> None:
    """Write the weighted sum of the experts to ``out_TH`` without synchronization; ids are within 0 to E - 1."""
    tokens, active = routing.topk_ids_TA.shape
    expert_R, order_R = routing.topk_ids_TA.flatten().sort(stable=True)
    experts = torch.arange(problem.spec.experts, device=x_TH.device)
    ends_E = torch.searchsorted(expert_R, experts, right=True, out_int32=True)
    weight_R1 = routing.topk_weights_TA.flatten()[order_R, None]
    x_RH = x_TH[order_R // active]
    if problem.weight_on == "input":
        x_RH.mul_(weight_R1)
    gate_up = F.grouped_mm(x_RH, weights.gate_up_EFH.transpose(-2, -1), offs=ends_E)
    if weights.gate_up_bias_EF is not None:
        gate_up += weights.gate_up_bias_EF[expert_R]
    act = problem.activation
    h_RF = act(*gate_up.chunk(2, dim=-1)) if act.gated is True else act(gate_up)
    y_RH = F.grouped_mm(h_RF.contiguous(), weights.down_EHF.transpose(-2, -1), offs=ends_E)
    if weights.down_bias_EH is not None:
        y_RH += weights.down_bias_EH[expert_R]
    if problem.weight_on == "output":
        y_RH.mul_(weight_R1)
    natural_RH = torch.empty_like(y_RH).index_copy_(0, order_R, y_RH)
    torch.sum(natural_RH.view(tokens, active, -1), 1, out=out_TH)
