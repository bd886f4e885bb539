"""FlashInfer's CUTLASS layer of experts for MXFP4 on SM90, with its autotuner, and its single kernel for one FP8 shape.
Calls are those of versions 0.6.14 and 0.7.2."""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks, peer_problem
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import FP8_GROUP128, UNQUANTIZED
from polymoe.problem.verdict import Reason, Reasons


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


@dataclass(frozen=True, slots=True)
class MonoMoe:
    """``mono_moe``: routing and experts in one kernel, for one shape and at most 8 tokens. Its time includes the
    routing, for which it gets logits that lead to the call's experts and weights."""

    name: str = "monomoe"
    package: str = "flashinfer-python"
    compiles_at_once: bool = False

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        """Return every reason against the problem."""
        reasons, spec = Reasons(), problem.spec
        sizes = (spec.hidden, spec.intermediate, spec.experts)
        reasons.need(sizes == (2048, 512, 256), "sizes", "H 2048, F 512, E 256", "H {}, F {}, E {}".format(*sizes))
        reasons.need(problem.top_k <= 8, "experts of a token", "at most 8", problem.top_k)
        return (*peer_problem(problem, {"fp8_block128": (FP8_GROUP128,)}), *reasons.found)

    def prepare(self, problem: Problem, stacks: Stacks) -> PeerCall:
        """Interleave gate and up. Logits are computed at the first call with the same routing, and kept."""
        from flashinfer.fused_moe.monomoe import alloc_scratchpad, interleave_for_tma_wgmma_up, mono_moe

        up, down = stacks.gate_up, stacks.down
        gate_up = interleave_for_tma_wgmma_up(up["codes"])
        scales = [part["scales"].float() for part in (up, down)]
        scratchpad = alloc_scratchpad(gate_up.device)
        logits: dict[tuple[int, int], Tensor] = {}

        def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
            key = len(x_TH), weights_TA.data_ptr()
            if key not in logits:
                never_TE = torch.full((len(x_TH), problem.spec.experts), -1e4, dtype=torch.bfloat16, device=x_TH.device)
                logits[key] = never_TE.scatter_(1, ids_TA.long(), weights_TA.log().bfloat16())
            mono_moe(
                x_TH, logits[key], gate_up, scales[0], down["codes"], scales[1], ids_TA.shape[1], out=out_TH,
                scratchpad=scratchpad, interleave_up=False,
            )  # fmt: skip

        return call
