"""The reference: plain PyTorch in float32, one expert at a time. Every other backend is tested against it.

Only experts that receive tokens are dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import torch

from polymoe.backends.base import BackendBase, Prediction, Runner, RunnerBase, mapped_ids
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.features import ANY, SHARDS, Handled
from polymoe.errors import CheckpointError
from polymoe.formats.elements import E2M1_VALUES, decode_scale, encode_e2m1, encode_e4m3, encode_scale
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ACTIVATIONS, UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import Activation
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from polymoe.problem.verdict import Accepted, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments

# Bytes that torch moves to dequantize one weight: conversion of codes to float32, expansion of scales, their product,
# and the read by the matrix product.
_DEQUANTIZED_BYTES = 24


_HANDLES: Handled = {
    **SHARDS,
    "activation": get_args(Activation),
    "weight_on": ("output", "input"),
    "dtype": ("bf16", "fp16", "fp32"),
    "activations": tuple(mode for mode in ACTIVATIONS.values() if not mode.fast_accumulation),
    "scales": ANY,
    "spec.bias": ANY,
}


@dataclass(frozen=True, slots=True)
class Reference(BackendBase):
    """Runs every format on any device, slowly. Calls cannot be captured in CUDA graphs, because the host reads which
    experts have tokens."""

    name: str = "reference"
    layouts: tuple[str, ...] = ("natural",)
    handles = _HANDLES
    """Everything but batch-invariant results: torch's order of summation depends on the number of rows."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Accept every problem whose features it handles.

        On a GPU it runs only when named; otherwise it would hide that no fast backend was found.
        """
        on_gpu = machine.device.kind == "cuda"
        return Accepted(opt_in_reason="slow on a GPU: runs there only on request" if on_gpu else "")

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        return Config()

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Return the time to dequantize at memory bandwidth, plus the matrix products at the 16-bit rate."""
        c = cost(problem, machine.device, tokens)
        weights = c.active_experts * sum(n * k for n, k in map(problem.spec.matrix_shape, problem.spec.encodings))
        return Prediction(1e6 * weights * _DEQUANTIZED_BYTES / machine.device.bandwidth + c.compute_us, "cost model")

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Return all of them; but rounding has no gradient, so none goes through quantized inputs."""
        if not problem.activations.quantized:
            return frozenset(("x_TH", "topk_weights_TA", "out"))
        return frozenset(("topk_weights_TA", "out") if problem.weight_on == "output" else ("out",))

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Return a runner that reads the packed tensors through their layout's ``unpack``."""
        dynamic = problem.activations.scales_per_row(problem.spec.hidden) is not None
        options = frozenset(("expert_map", "x_scales") if dynamic else ("expert_map",))
        return ReferenceRunner(problem, LAYOUTS[packed.layout].unpack(packed), options)


@dataclass(frozen=True, slots=True)
class ReferenceRunner(RunnerBase):
    """Runs the experts of one layer, and dequantizes them in each call."""

    problem: Problem
    weights: ExpertWeights
    options: frozenset[str]

    def run(self, call: CallArguments, config: Config) -> None:
        problem, x_TH, routing, x_scales = self.problem, call.x_TH, call.routing, call.x_scales
        if call.expert_map is not None:
            ids_TA = mapped_ids(call.topk_ids_TA, call.expert_map)
            first = problem.spec.first_expert
            routing = Routing(torch.where(ids_TA < 0, -1, ids_TA + first), call.topk_weights_TA)
        if x_scales is not None:
            width = problem.activations.group_columns or x_TH.shape[1]
            x_TH = x_TH.float() * x_scales.repeat_interleave(width, 1)[:, : x_TH.shape[1]]
        call.out_TH.copy_(run_experts(problem, self.weights, x_TH, routing, quantize_x=x_scales is None))


def run_experts(
    problem: Problem,
    weights: ExpertWeights,
    x_TH: Tensor,
    routing: Routing,
    dtype: torch.dtype | None = None,
    *,
    quantize_x: bool = True,
) -> Tensor:
    """Return the weighted sum of the experts, ``[T, H]`` in ``dtype``.

    Row t is the sum over a of ``weight[t, a] * expert[ids[t, a]](x[t])``; the down bias is inside the weighted sum.
    With ``weight_on="input"``, the terms are ``expert(weight * x)``. Where the scale of x follows a factor of the row
    (``amax / 448``), x is rounded first: exactly that is the same, but x in 16 bits is often halfway between two E4M3
    numbers, where the product's own rounding would decide. Kernels round each token once, before its weights.
    Ids outside this rank's experts add nothing.

    Args:
        dtype: of the computation: float32 by default, or float64 to test the float32 result.
        quantize_x: whether to emulate the quantization of x as well as that of h.
    """
    spec = problem.spec
    dtype = dtype or torch.float32
    x = x_TH.to(dtype)
    out = torch.zeros(x_TH.shape[0], spec.hidden, dtype=dtype, device=x_TH.device)
    local = routing.topk_ids_TA - spec.first_expert
    scales = layer_input_scales(weights) if problem.activations.global_scale else None
    if problem.weight_on == "input" and quantize_x and _follows_a_factor(problem.activations):
        x, quantize_x = emulate_activations(x, problem.activations), False
    with torch.autocast(x_TH.device.type, enabled=False):  # autocast would compute the products in 16 bits
        for e in local[(local >= 0) & (local < spec.local_experts)].unique().tolist():
            token, slot = (local == e).nonzero(as_tuple=True)
            weight = routing.topk_weights_TA[token, slot].to(dtype)[:, None]
            rows = x[token] * weight if problem.weight_on == "input" else x[token]
            expert = weights.expert(e)
            if scales is not None:
                gate_up, down = (scale.to(x.device) for scale in scales)
                expert = replace(expert, gate_up_input_scale=gate_up, down_input_scale=down)
            y = run_expert(expert, rows, problem.activation, problem.activations, quantize_x=quantize_x)
            out.index_add_(0, token, y if problem.weight_on == "input" else y * weight)
    return out


def layer_input_scales(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Return the global scales of quantized x and h: the largest input scales of this rank's experts, float32 scalars,
    and 1 for a projection where an expert has none."""
    experts = [weights.peek(e) for e in range(weights.spec.local_experts)]

    def largest(found: list[Tensor | None]) -> Tensor:
        scales = [scale.float().reshape(()) for scale in found if scale is not None]
        if len(scales) < len(found) or not scales:
            return _one()
        most = torch.stack(scales).amax()
        return torch.where(most.isfinite() & (most > 0), most, torch.ones_like(most))

    return largest([e.gate_up_input_scale for e in experts]), largest([e.down_input_scale for e in experts])


def run_expert(
    expert: Expert,
    x_TH: Tensor,
    activation: Activation,
    activations: ActivationQuantization = UNQUANTIZED,
    *,
    quantize_x: bool = True,
) -> Tensor:
    """Apply one expert to every row of x: ``down(activation(gate(x), up(x)))``, [T, H] in x's dtype (float32 or
    float64)."""

    def project(name: str, x: Tensor) -> Tensor:
        y = x @ expert.projections[name].dequantize(x.dtype).T
        bias = getattr(expert, f"{name}_bias")
        return y if bias is None else y + bias.to(x.dtype)

    x = emulate_activations(x_TH, activations, expert.gate_up_input_scale) if quantize_x else x_TH
    up = project("up", x)
    inputs = (up,) if expert.gate is None else (project("gate", x), up)
    h = activation(*inputs)
    return project("down", emulate_activations(h, activations, expert.down_input_scale))


def _follows_a_factor(activations: ActivationQuantization) -> bool:
    """Whether a row times a factor has the same codes, and scales times the factor."""
    return activations.scale_dtype == "float32" and not activations.static


def emulate_activations(
    x_TK: Tensor, quantization: ActivationQuantization | str, input_scale: Tensor | None = None
) -> Tensor:
    """Round x [T, K] to E4M3 or E2M1 and back, as a kernel with this quantization does; without quantization, return x.

    Each scale is ``amax / 448`` of the values that share it, for E8M0 the next power of two that is not smaller; or
    ``input_scale`` if scales are static. With a global scale g, ``input_scale`` or 1, an E4M3 scale s is the nearest to
    ``amax / g / 6``, at most 448, and x becomes the E2M1 number that is nearest to ``x / g / s``, times s times g.

    Raises:
        CheckpointError: if scales are static and the checkpoint has no input scale.
    """
    quantization = ActivationQuantization.of(quantization)
    if not quantization.quantized:
        return x_TK
    if quantization.static:
        if input_scale is None:
            raise CheckpointError(
                "input scale",
                expected="one for each projection",
                got="none in the checkpoint",
                hint='load with activations="fp8_token" or "16bit"',
            )
        scale = input_scale.to(x_TK.dtype)
        return encode_e4m3(x_TK / scale).to(x_TK.dtype) * scale
    rows, columns = x_TK.shape
    width = quantization.group_columns or columns
    blocks = torch.nn.functional.pad(x_TK, (0, -columns % width)).view(rows, -1, width)
    amax = blocks.abs().amax(-1, keepdim=True)
    if quantization.element == "e2m1":
        return _round_e2m1(blocks, amax, input_scale).view(rows, -1)[:, :columns]
    # Divide by a tensor: torch on a GPU divides by a number through its reciprocal, so that ties round differently.
    scale = amax / torch.full_like(amax, 448)
    if quantization.scale_dtype == "e8m0":
        scale = decode_scale(encode_scale(scale.float(), "e8m0"), x_TK.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (encode_e4m3(blocks / scale).to(x_TK.dtype) * scale).view(rows, -1)[:, :columns]


def _one() -> Tensor:
    """Return the global scale of experts that have none."""
    return torch.ones((), dtype=torch.float32, device="cpu")


def _round_e2m1(blocks: Tensor, amax: Tensor, global_scale: Tensor | None) -> Tensor:
    dtype = blocks.dtype
    g = _one() if global_scale is None else global_scale.float()
    factor = g.reciprocal().to(blocks.device)  # kernels multiply by it: a tie may round differently if x is divided
    scale = encode_e4m3(amax.float() * (factor / 6)).float()
    # A group whose scale is 0 is 0, whatever its numbers.
    ratio = factor / torch.where(scale == 0, torch.ones_like(scale), scale)
    values = torch.tensor(E2M1_VALUES, dtype=dtype, device=blocks.device)
    return values[encode_e2m1(blocks * ratio.to(dtype)).int()] * (scale / factor).to(dtype)
