"""QuACK's grouped bfloat16 GEMMs (the kernels of SonicMoE), with this library's sort and sum around them.

Read from quack-kernels 0.6.5. Rows of x are gathered by the first GEMM, which has the activation in it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks
from polymoe.problem import Problem


def prepare(problem: Problem, stacks: Stacks) -> PeerCall:
    """``gemm_gated`` and ``gemm`` with experts as batches of different lengths; rows of gate and up are interleaved.
    Kernels are compiled at the first call."""
    from quack.gemm_interface import gemm, gemm_gated

    from polymoe.kernels.triton.finalize import finalize
    from polymoe.kernels.triton.permute import permutation_words, permute

    experts, width, hidden = problem.spec.local_experts, problem.spec.intermediate, problem.spec.hidden
    up_EFH = stacks.gate_up["codes"].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()
    down_EHF, device = stacks.down["codes"], up_EFH.device
    bounds = torch.arange(experts + 1, dtype=torch.int32, device=device)

    def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
        rows, top_k = ids_TA.numel(), ids_TA.shape[1]
        buffer = torch.empty(permutation_words(rows, experts, 128), dtype=torch.int32, device=device)
        order_R = permute(buffer, ids_TA, 0, experts, 128).permuted_to_expanded_R
        sorted_R = ids_TA.flatten().index_select(0, order_R)
        starts = torch.searchsorted(sorted_R, bounds, out_int32=True)
        _, h_RF = gemm_gated(
            x_TH, up_EFH.mT, activation="swiglu", cu_seqlens_m=starts, A_idx=order_R // top_k, store_preact=False,
            tuned=False, postact_out=torch.empty(rows, width, dtype=x_TH.dtype, device=device),
        )  # fmt: skip
        y_RH = gemm(h_RF, down_EHF.mT, cu_seqlens_m=starts, tuned=False)
        expanded_RH = torch.empty(rows, hidden, dtype=x_TH.dtype, device=device)
        expanded_RH.index_copy_(0, order_R.long(), y_RH)
        finalize(expanded_RH[None], ids_TA, weights_TA, out_TH, 0, experts, weighted=True, pdl=False)

    return call
