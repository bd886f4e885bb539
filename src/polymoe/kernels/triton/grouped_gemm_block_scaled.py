"""The grouped GEMM whose MMA takes E8M0 scales: E4M3 times E4M3, one scale for 32 columns on both sides (MXFP8).
Where 128 columns of x share a scale, the MMA gets it four times.

On SM120 ``tl.dot_scaled`` becomes the block-scaled MMA, at four times the rate of 16-bit operands. Elsewhere Triton
converts both operands to bfloat16. E2M1 weights are expanded to E4M3, which holds them exactly. As in
:mod:`.grouped_gemm`, A and B are swapped, and a CTA computes one work tile of gate and up together.
"""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import activate, pdl_wait_and_launch
from polymoe.kernels.triton.grouped_gemm import epilogue, result_at, tile_rows

MX_GROUP = tl.constexpr(32)
"""Columns that share a scale of weights."""

_E2M1_SHIFT = tl.constexpr(6)
"""E2M1's bits in E4M3's fields are the number times 2**-6, subnormal numbers too. The epilogue undoes it."""


@triton.jit
def _e2m1_to_e4m3(codes, PLAIN: tl.constexpr):
    """Return E4M3 [N, K], times 2**-6, of two E2M1 codes a byte [N, K / 2]."""
    if PLAIN:
        low = ((codes << 4) & 0x80) | ((codes << 2) & 0x1C)
        high = (codes & 0x80) | ((codes >> 2) & 0x1C)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 s, m;
            shl.b32 s, $2, 4;
            shl.b32 m, $2, 2;
            and.b32 m, m, 0x1C1C1C1C;
            lop3.b32 $0, s, 0x80808080, m, 0xEA;
            shr.u32 m, $2, 2;
            and.b32 m, m, 0x1C1C1C1C;
            lop3.b32 $1, $2, 0x80808080, m, 0xEA;
            }
            """,
            "=&r,=&r,r",
            [codes],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return tl.interleave(low, high).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _load_weights(
    ptr, code_at, scale_ptr, scale_at, step,
    K: tl.constexpr, E2M1: tl.constexpr, PLAIN: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load one step's weights as E4M3 [BLOCK_N, BLOCK_K], and their scales [BLOCK_N, BLOCK_K / MX_GROUP]."""
    BYTES: tl.constexpr = BLOCK_K // 2 if E2M1 else BLOCK_K
    bytes: tl.constexpr = K // 2 if E2M1 else K
    byte = step * BYTES + tl.arange(0, BYTES)
    group = step * (BLOCK_K // MX_GROUP) + tl.arange(0, BLOCK_K // MX_GROUP)
    code_ptrs, scale_ptrs = ptr + code_at + byte[None, :], scale_ptr + scale_at + group[None, :]
    if MASKED:
        codes = tl.load(code_ptrs, mask=(byte < bytes)[None, :], other=0)
        scales = tl.load(scale_ptrs, mask=(group * MX_GROUP < K)[None, :], other=0)
    else:
        codes = tl.load(code_ptrs)
        scales = tl.load(scale_ptrs)
    if E2M1:
        return _e2m1_to_e4m3(codes, PLAIN), scales
    else:
        return codes.to(tl.float8e4nv, bitcast=True), scales


@triton.jit
def grouped_gemm_block_scaled(
    x_ptr, x_scale_ptr, out_ptr, gate_ptr, gate_scale_ptr, gate_bias_ptr, up_ptr, up_scale_ptr, up_bias_ptr,
    permuted_to_expanded_ptr, tile_expert_ptr, tile_first_ptr, tile_last_ptr, weight_ptr,
    top_k, code_e, code_n, scale_e, scale_n, bias_e,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, E2M1: tl.constexpr, X_GROUP: tl.constexpr,
    PLAIN: tl.constexpr,
    BIAS: tl.constexpr, ROUTER_WEIGHT_ON_INPUT: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of one expert's weights by one work tile, up to BLOCK_M permuted rows.

    The grid is ``num_tiles * ceil(N / BLOCK_N)``; CTAs of unused work tiles return at once. x is E4M3 [rows, K] with
    E8M0 scales [rows, ceil(K / X_GROUP)]; out is [rows, N]. Strides of codes and scales are in bytes.
    GATHER reads x by token, SCATTER writes expanded rows; otherwise both are permuted rows.
    """
    pdl_wait_and_launch(PDL)
    pid = tl.program_id(0)
    num_n_blocks = tl.cdiv(N, BLOCK_N)
    n_block, tile = pid % num_n_blocks, pid // num_n_blocks
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tile_first_ptr + tile)
    last = tl.load(tile_last_ptr + tile)
    row, valid = tile_rows(first, last, BLOCK_M)
    expanded_row = tl.load(permuted_to_expanded_ptr + row)
    x_row = (expanded_row // top_k if GATHER else row).to(tl.int64)
    out_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(out_n, N - 1)

    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = STEPS * BLOCK_K != K
    X_GROUPS: tl.constexpr = (K + X_GROUP - 1) // X_GROUP
    SHARED: tl.constexpr = X_GROUP // MX_GROUP  # groups with the same scale of x
    code_at = expert * code_e + n[:, None].to(tl.int64) * code_n
    scale_at = expert * scale_e + n[:, None].to(tl.int64) * scale_n
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    gate_acc = acc
    for step in range(STEPS):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        group = step * (BLOCK_K // MX_GROUP) + tl.arange(0, BLOCK_K // MX_GROUP)
        x_ptrs = x_ptr + x_row[None, :] * K + column[:, None]
        x_scale_ptrs = x_scale_ptr + x_row[:, None] * X_GROUPS + group[None, :] // SHARED
        if MASKED:
            x = tl.load(x_ptrs, mask=(column < K)[:, None], other=0.0)
            x_scales = tl.load(x_scale_ptrs, mask=(group < X_GROUPS * SHARED)[None, :], other=0)
        else:
            x = tl.load(x_ptrs)
            x_scales = tl.load(x_scale_ptrs)
        up, up_scales = _load_weights(up_ptr, code_at, up_scale_ptr, scale_at, step, K, E2M1, PLAIN, BLOCK_K, MASKED)
        acc = tl.dot_scaled(up, up_scales, "e4m3", x, x_scales, "e4m3", acc)
        if GATED:
            gate, gate_scales = _load_weights(
                gate_ptr, code_at, gate_scale_ptr, scale_at, step, K, E2M1, PLAIN, BLOCK_K, MASKED
            )
            gate_acc = tl.dot_scaled(gate, gate_scales, "e4m3", x, x_scales, "e4m3", gate_acc)

    weight = tl.load(weight_ptr + expanded_row) if ROUTER_WEIGHT_ON_INPUT else valid
    UNSHIFT: tl.constexpr = _E2M1_SHIFT if E2M1 else 0
    acc = epilogue(
        acc, None, None, up_bias_ptr, expert, n, scale_e, scale_n, bias_e, valid, weight,
        1.0, None, False, 1, False, BIAS, UNSHIFT, "none", ROUTER_WEIGHT_ON_INPUT,
    )  # fmt: skip
    if GATED:
        gate_acc = epilogue(
            gate_acc, None, None, gate_bias_ptr, expert, n, scale_e, scale_n, bias_e, valid, weight,
            1.0, None, False, 1, False, BIAS, UNSHIFT, "none", ROUTER_WEIGHT_ON_INPUT,
        )  # fmt: skip
    result = activate(gate_acc, acc, ACTIVATION, ALPHA, BETA, LIMIT)
    out_at, mask = result_at(out_ptr, expanded_row if SCATTER else row, valid, out_n, out_n < N, N)
    tl.store(out_at, tl.trans(result).to(out_ptr.dtype.element_ty), mask=mask)
