"""FlashInfer's CUTLASS layer of experts for MXFP4 on SM90, with its autotuner. Calls are those of version 0.6.14."""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks, peer_problem
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import UNQUANTIZED
from polymoe.problem.verdict import Reason


@dataclass(frozen=True, slots=True)
class FlashInferLayers:
    """``cutlass_fused_moe`` with 4-bit weights and bfloat16 activations."""

    name: str = "flashinfer"
    package: str = "flashinfer-python"
    compiles_at_once: bool = False

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        """Return every reason against the problem."""
        return peer_problem(problem, {"mxfp4": (UNQUANTIZED,)})

    def prepare(self, problem: Problem, stacks: Stacks) -> PeerCall:
        """Interleave the weights. The first call of a number of tokens searches tactics."""
        import flashinfer.fused_moe as moe
        from flashinfer.autotuner import autotune

        width, up, down = problem.spec.intermediate, stacks.gate_up, stacks.down

        def up_first(part: Tensor) -> Tensor:
            return torch.cat([part[:, width:], part[:, :width]], 1).contiguous()

        codes = [
            moe.interleave_moe_weights_for_sm90_mixed_gemm(part, "fp4")
            for part in (up_first(up["codes"]), down["codes"])
        ]
        scales = [
            moe.interleave_moe_scales_for_sm90_mixed_gemm(part)
            for part in (up_first(up["scales"].view(torch.uint8)), down["scales"].view(torch.uint8))
        ]
        tuned: set[int] = set()

        def run(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
            moe.cutlass_fused_moe(
                x_TH, ids_TA, weights_TA, *codes, torch.bfloat16, quant_scales=scales, use_w4_group_scaling=True,
                output=out_TH,
            )  # fmt: skip

        def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
            if len(x_TH) not in tuned:
                tuned.add(len(x_TH))
                with autotune(True):
                    run(x_TH, ids_TA, weights_TA, out_TH)
            run(x_TH, ids_TA, weights_TA, out_TH)

        return call
