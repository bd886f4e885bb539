"""What of a layer its calls need: addresses of the weights, sizes, the activation's constants."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polymoe.kernels.cuda.launch.args import DTYPES, GemmArgs
from polymoe.kernels.cuda.sizes import Pipeline

__all__ = ["Activation", "Layer", "Matrix"]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Packed ``up`` (gate and up interleaved by 8 rows, where there is a gate) or ``down``.

    Attributes:
        format: of the weights, as in ``sizes.FamilySizes.formats``.
        codes, scales: uint8 [E, bytes]; scales are None where weights have none.
        n, k: rows and columns; of ``up`` with a gate, n is 2F.
        bias, up_bias: [E, n] in a 16-bit or 32-bit float, or None; with a gate, the gate's and up's [E, F].
        expert_scale, up_expert_scale: float32 [E], what multiplies all weights of an expert, or None; with a gate, the
            gate's and up's.
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

    def args(self, pipeline: Pipeline, block_m: int, activation: Activation) -> GemmArgs:
        """Arguments of a GEMM, without what depends on the call."""
        parts = (self.codes, self.scales, self.bias, self.up_bias, self.expert_scale, self.up_expert_scale)
        args = GemmArgs(*(None if part is None else part.data_ptr() for part in parts))
        args.codes_stride = self.codes.shape[1]
        args.scales_stride = 0 if self.scales is None else self.scales.shape[1]
        args.n, args.k, args.block_m = self.n, self.k, block_m
        args.stages, args.x_buffers = pipeline.stages, pipeline.x_buffers
        args.bias_dtype = 0 if self.bias is None else DTYPES[self.bias.dtype] + 1
        args.activation, args.alpha, args.beta, args.limit = (
            activation.kind,
            activation.alpha,
            activation.beta,
            activation.limit,
        )
        return args


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the projections.

    Attributes:
        kind: 0 SwiGLU, 1 GELU, 2 its tanh form; without a gate always relu squared.
        alpha, beta, limit: of SwiGLU; limit 0 is none.
    """

    kind: int
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's experts on one GPU.

    Attributes:
        up, down: the packed matrices.
        gated: whether ``up`` holds gate and up.
        activation: between them.
        first_expert, experts: the experts on this rank.
        router_weight_on_input: whether router weights multiply the input of the activation, not the output.
        sms: SMs of the GPU: the GEMMs run one CTA on each.
    """

    up: Matrix
    down: Matrix
    gated: bool
    activation: Activation
    first_expert: int
    experts: int
    router_weight_on_input: bool
    sms: int
