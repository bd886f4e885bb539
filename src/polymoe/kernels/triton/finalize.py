"""Finalize: the weighted sum of each token's expanded rows, after the last GEMM."""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import ceil_div, launch_options, pdl_wait_and_launch


def finalize(
    y_SRH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor, first_expert: int, experts: int, *,
    weighted: bool, pdl: bool,
) -> None:  # fmt: skip
    """Compute ``out[t] = sum over a of weight[t, a] * sum over s of y[s, t * A + a]`` in float32, in order of a and s.

    ``y_SRH`` [split-K parts, expanded rows, H] is never read where an expert belongs to another rank. Without
    ``weighted`` every weight is 1.
    """
    tokens, top_k = ids_TA.shape
    columns = out_TH.shape[1]
    block = min(1024, triton.next_power_of_2(columns)) if tokens > 16 else min(256, triton.next_power_of_2(columns))
    _finalize[(tokens, ceil_div(columns, block))](
        y_SRH, ids_TA, weights_TA, out_TH, columns, y_SRH.stride(0),
        ids_TA.stride(0), ids_TA.stride(1), weights_TA.stride(0), weights_TA.stride(1),
        out_TH.stride(0), out_TH.stride(1), first_expert, experts,
        TOP_K=top_k, SPLIT_K=y_SRH.shape[0], WEIGHTED=weighted, BLOCK=block, PDL=pdl,
        num_warps=4 if block > 256 else 2, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _finalize(
    y_ptr, ids_ptr, weights_ptr, out_ptr, columns, y_split, ids_t, ids_a, weights_t, weights_a, out_t, out_h,
    first_expert, experts, TOP_K: tl.constexpr, SPLIT_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait_and_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        expert = tl.load(ids_ptr + token * ids_t + choice * ids_a).to(tl.int64) - first_expert
        here = (expert >= 0) & (expert < experts)
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights_ptr + token * weights_t + choice * weights_a)
        y = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLIT_K):
            at = y_ptr + split * y_split + (token * TOP_K + choice) * columns + column
            y += tl.load(at, mask=(column < columns) & here, other=0.0).to(tl.float32)
        total += tl.where(here, weight * y, 0.0)
    tl.store(out_ptr + token * out_t + column * out_h, total.to(out_ptr.dtype.element_ty), mask=column < columns)
