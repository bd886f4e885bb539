"""The parts of a layer that launches need: weights, sizes, and constants of the activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from polymoe.kernels.cuda.launch.args import GemmArgs, dtype_number
from polymoe.kernels.cuda.pipelines import Budget, Pipeline
from polymoe.kernels.cuda.targets import Target

if TYPE_CHECKING:
    from torch import Tensor


class ActivationArgs(NamedTuple):
    """The function between the projections, as the kernels' arguments say it.

    Attributes:
        activation: 0 for SwiGLU, 1 for GeGLU, 2 for GeGLU with tanh. Without a gate, it is ReLU squared.
        alpha, beta, limit: constants of SwiGLU; there is no limit if ``limit`` is 0.
    """

    activation: int
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Packed ``up`` (gate and up interleaved by 8 rows, where there is a gate) or ``down``.

    Attributes:
        format: name of the weight format, as in ``KernelFamily.formats``.
        codes, scales: uint8 [E, bytes]; scales are None for unquantized weights.
        n, k: rows and columns; n is 2F for ``up`` with a gate.
        bias, up_bias: bfloat16, float16 or float32, or None. With a gate: the biases of gate and up, [E, F]. Otherwise
            ``bias`` is [E, n].
        expert_scale, up_expert_scale: float32 [E], global scales of the experts, or None. With a gate: those of gate
            and up. Otherwise ``expert_scale`` alone is used.
        input_scale: float32 [E], the checkpoint's scales of x or h, where these are static; or None.
    """

    format: str
    codes: Tensor
    scales: Tensor | None
    n: int
    k: int
    bias: Tensor | None = None
    up_bias: Tensor | None = None
    expert_scale: Tensor | None = None
    up_expert_scale: Tensor | None = None
    input_scale: Tensor | None = None

    def args(self, kind: type[GemmArgs], pipeline: Pipeline, block_m: int, activation: ActivationArgs) -> GemmArgs:
        """Return the arguments of a GEMM, of type ``kind``, with those that do not depend on the call."""
        parts = (self.codes, self.scales, self.bias, self.up_bias, self.expert_scale, self.up_expert_scale)
        args = kind(*(None if part is None else part.data_ptr() for part in parts), **activation._asdict())
        args.codes_stride = self.codes.shape[1]
        args.scales_stride = 0 if self.scales is None else self.scales.shape[1]
        args.n, args.k, args.block_m = self.n, self.k, block_m
        args.stages, args.x_buffers = pipeline.stages, pipeline.x_buffers
        args.bias_dtype = 0 if self.bias is None else dtype_number(self.bias.dtype) + 1
        return args


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's experts on one GPU.

    Attributes:
        up, down: the packed matrices.
        gated: whether ``up`` holds gate and up.
        activation: the activation between them.
        experts: the number of experts on this rank.
        router_weight_on_input: whether router weights multiply the input of the activation, not the output.
        sms: number of SMs of the GPU; GEMMs launch one CTA per SM.
        target: the set of cubins for the GPU.
        budget: the shared memory of a CTA on the GPU.
    """

    up: Matrix
    down: Matrix
    gated: bool
    activation: ActivationArgs
    experts: int
    router_weight_on_input: bool
    sms: int
    target: Target
    budget: Budget
