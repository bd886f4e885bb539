"""The grouped GEMM where K is a few steps long (the down projection of a tensor-parallel rank).

A CTA then computes several blocks of weight rows in turn. x stays in shared memory, and the pipelined loop runs over
those blocks: a loop over K would end before its pipeline is full.
"""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import pdl_wait_and_launch
from polymoe.kernels.triton.grouped_gemm import (
    epilogue,
    load_groups,
    planes_of,
    result_at,
    scale_rows,
    step_scale,
    tile_rows,
)

MAX_STEPS = 4
"""Most steps of K, all of which x keeps in shared memory."""


@triton.jit
def grouped_gemm_short_k(
    x_ptr, x_scale_ptr, out_ptr, code_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr,
    permuted_to_expanded_ptr, tile_expert_ptr, tile_first_ptr, tile_last_ptr,
    x_groups, code_e, code_n, code_k, scale_e, scale_n, scale_k, bias_e,
    N: tl.constexpr, K: tl.constexpr,
    DECODE: tl.constexpr, FACTOR: tl.constexpr, PLANES: tl.constexpr, OPERAND: tl.constexpr, PLAIN: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ZERO_POINTS: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr, UNSHIFT: tl.constexpr,
    X_SCALE: tl.constexpr, X_GROUP: tl.constexpr, N_BLOCKS_PER_CTA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute N_BLOCKS_PER_CTA blocks of one expert's weight rows by one work tile, and write expanded rows.

    The grid is ``num_tiles * ceil(ceil(N / BLOCK_N) / N_BLOCKS_PER_CTA)``. Arguments are those of
    :func:`~.grouped_gemm.grouped_gemm`.
    """
    pdl_wait_and_launch(PDL)
    pid = tl.program_id(0)
    num_n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ctas_per_tile: tl.constexpr = (num_n_blocks + N_BLOCKS_PER_CTA - 1) // N_BLOCKS_PER_CTA
    tile = pid // ctas_per_tile
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tile_first_ptr + tile)
    last = tl.load(tile_last_ptr + tile)
    start = pid % ctas_per_tile * N_BLOCKS_PER_CTA
    for is_tail in tl.static_range(2 if TAIL_BLOCK_M > 0 else 1):
        if TAIL_BLOCK_M == 0 or (last - first <= TAIL_BLOCK_M) == (is_tail == 1):
            _short_k_tile(
                x_ptr, x_scale_ptr, out_ptr, code_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr,
                permuted_to_expanded_ptr, x_groups, code_e, code_n, code_k, scale_e, scale_n, scale_k, bias_e,
                expert, first, last, start,
                N, K, DECODE, FACTOR, PLANES, OPERAND, PLAIN, SCALE_AT, GROUP_N, GROUP_K, SCALE_ALIGN, ZERO_POINTS,
                GLOBAL, BIAS, UNSHIFT, X_SCALE, X_GROUP, N_BLOCKS_PER_CTA, BLOCK_N,
                TAIL_BLOCK_M if is_tail else BLOCK_M, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _short_k_tile(
    x_ptr, x_scale_ptr, out_ptr, code_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr, permuted_to_expanded_ptr,
    x_groups, code_e, code_n, code_k, scale_e, scale_n, scale_k, bias_e, expert, first, last, start,
    N: tl.constexpr, K: tl.constexpr,
    DECODE: tl.constexpr, FACTOR: tl.constexpr, PLANES: tl.constexpr, OPERAND: tl.constexpr, PLAIN: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ZERO_POINTS: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr, UNSHIFT: tl.constexpr,
    X_SCALE: tl.constexpr, X_GROUP: tl.constexpr, N_BLOCKS_PER_CTA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = STEPS * BLOCK_K != K
    WORDS: tl.constexpr = BLOCK_K // PLANES
    words: tl.constexpr = K // PLANES
    LOOP: tl.constexpr = SCALE_AT == "loop"
    SCALED: tl.constexpr = LOOP or SCALE_AT == "block"
    BY_STEP: tl.constexpr = SCALE_AT == "block" or X_SCALE == "block"
    GROUPS: tl.constexpr = BLOCK_K // GROUP_K if LOOP and BLOCK_K > GROUP_K else 1
    row, valid = tile_rows(first, last, BLOCK_M)
    out_row = tl.load(permuted_to_expanded_ptr + row)
    x_at = x_ptr + row.to(tl.int64)[None, :] * K
    x_scale_at = x_scale_ptr + row * x_groups
    xs = ()
    x_scales = ()
    for s in tl.static_range(STEPS):
        x_word = s * WORDS + tl.arange(0, WORDS)[:, None]
        for p in tl.static_range(PLANES):
            x_ptrs = x_at + p * words + x_word
            x = tl.load(x_ptrs, mask=x_word < words, other=0.0) if MASKED else tl.load(x_ptrs)
            xs = xs + (x,)  # noqa: RUF005 - Triton has no starred tuples
        x_group = tl.load(x_scale_at + s * BLOCK_K // X_GROUP) if X_SCALE == "block" else row
        x_scales = x_scales + (x_group,)  # noqa: RUF005
    x_scale = tl.load(x_scale_at) if X_SCALE == "row" else valid

    for n_block in range(N_BLOCKS_PER_CTA):  # beyond N nothing is written
        out_n = (start + n_block) * BLOCK_N + tl.arange(0, BLOCK_N)
        n = tl.minimum(out_n, N - 1)
        code_at = expert * code_e + n[:, None].to(tl.int64) * code_n
        scale_at = scale_rows(expert, n, scale_e, scale_n, GROUP_N, SCALE_ALIGN)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for s in tl.static_range(STEPS):
            word = s * WORDS + tl.arange(0, WORDS)[None, :]
            ptrs = code_ptr + code_at + word * code_k
            codes = tl.load(ptrs, mask=word < words, other=0) if MASKED else tl.load(ptrs)
            scales = load_groups(scale_ptr, scale_at, scale_k, s, SCALED, GROUP_K, GROUPS, K, BLOCK_K, MASKED)
            zeros = load_groups(zero_ptr, scale_at, scale_k, s, ZERO_POINTS, GROUP_K, GROUPS, K, BLOCK_K, MASKED)
            planes = planes_of(
                codes, scales, zeros, DECODE, FACTOR, LOOP, ZERO_POINTS, OPERAND, PLAIN, BLOCK_N, WORDS, GROUPS
            )  # fmt: skip
            part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if BY_STEP else acc
            for p in tl.static_range(PLANES):
                part = tl.dot(planes[p], xs[s * PLANES + p], part, input_precision="ieee")
                if len(planes) > PLANES:
                    part = tl.dot(planes[PLANES + p], xs[s * PLANES + p], part, input_precision="ieee")
            acc = acc + part * step_scale(scales, x_scales[s], FACTOR, SCALE_AT, X_SCALE) if BY_STEP else part
        acc = epilogue(
            acc, scale_ptr, global_ptr, bias_ptr, expert, n, scale_e, scale_n, bias_e, x_scale, valid,
            1.0, FACTOR, SCALE_AT == "row", GROUP_N, GLOBAL, BIAS, UNSHIFT, X_SCALE, False,
        )  # fmt: skip
        out_at, mask = result_at(out_ptr, out_row, valid, out_n, out_n < N, N)
        tl.store(out_at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)
