"""FlashInfer's CUTLASS layer of experts for MXFP4 on SM90, with its autotuner, and its single kernel for one FP8 shape.
Calls are those of versions 0.6.14 and 0.7.2."""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks
from polymoe.problem import Problem
from polymoe.problem.verdict import Reasons


def cutlass_fused_moe(problem: Problem, stacks: Stacks) -> PeerCall:
    """4-bit weights, which are interleaved, and bfloat16 activations. The first call of a number of tokens searches
    tactics."""
    import flashinfer.fused_moe as moe
    from flashinfer.autotuner import autotune

    width, up, down = problem.spec.intermediate, stacks.gate_up, stacks.down

    def up_first(part: Tensor) -> Tensor:
        return torch.cat([part[:, width:], part[:, :width]], 1).contiguous()

    codes = [
        moe.interleave_moe_weights_for_sm90_mixed_gemm(part, "fp4") for part in (up_first(up["codes"]), down["codes"])
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


def mono_moe(problem: Problem, stacks: Stacks) -> PeerCall:
    """Routing and experts in one kernel, for one shape and at most 8 tokens; gate and up are interleaved. Its time
    includes the routing, for which it gets logits that lead to the call's experts and weights; they are computed at the
    first call with the same routing, and kept."""
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


def need_sizes_of_mono_moe(problem: Problem, reasons: Reasons) -> None:
    """Add reasons unless the problem has the one shape."""
    sizes = (problem.spec.hidden, problem.spec.intermediate, problem.spec.experts)
    reasons.need(sizes == (2048, 512, 256), "sizes", "H 2048, F 512, E 256", "H {}, F {}, E {}".format(*sizes))
    reasons.need(problem.top_k <= 8, "experts of a token", "at most 8", problem.top_k)
