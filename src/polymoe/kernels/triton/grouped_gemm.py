"""The grouped GEMM: each expert's weights times its permuted rows. Weights are decoded in registers, before the MMA.

A and B are swapped: the weights are the left operand, so that N of the weights is the MMA's M, and the permuted rows
(BLOCK_M of them, as few as 8) are the MMA's N. One CTA computes one work tile of gate and up together, so that it can
apply the activation.
"""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import activate, pdl_wait_and_launch
from triton.runtime.errors import OutOfResources as OutOfResources


@triton.jit
def load_groups(
    ptr, row_at, stride, step, USED: tl.constexpr, GROUP_K: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load scales or zero points of one step, as stored: [BLOCK_N, GROUPS]. Without USED, return the step's index."""
    if not USED:
        return step
    else:
        group = step * BLOCK_K // GROUP_K + tl.arange(0, GROUPS)
        ptrs = ptr + row_at + group[None, :] * stride
        if MASKED:
            return tl.load(ptrs, mask=(group * GROUP_K < K)[None, :], other=0)
        else:
            return tl.load(ptrs)


@triton.jit
def _scales(
    up_ptr, up_zero_ptr, gate_ptr, gate_zero_ptr, x_at, row_at, stride, step,
    GATED: tl.constexpr, SCALED: tl.constexpr, ZERO_POINTS: tl.constexpr, GROUP_K: tl.constexpr, GROUPS: tl.constexpr,
    X_SCALE: tl.constexpr, X_GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load scales and zero points of one step, of up, gate and x: the step's index where there are none."""
    up_scales = load_groups(up_ptr, row_at, stride, step, SCALED, GROUP_K, GROUPS, K, BLOCK_K, MASKED)
    up_zeros = load_groups(up_zero_ptr, row_at, stride, step, ZERO_POINTS, GROUP_K, GROUPS, K, BLOCK_K, MASKED)
    gate_scales = up_scales
    gate_zeros = up_zeros
    if GATED:
        gate_scales = load_groups(gate_ptr, row_at, stride, step, SCALED, GROUP_K, GROUPS, K, BLOCK_K, MASKED)
        gate_zeros = load_groups(gate_zero_ptr, row_at, stride, step, ZERO_POINTS, GROUP_K, GROUPS, K, BLOCK_K, MASKED)
    x_scales = step
    if X_SCALE == "block":
        group = step * BLOCK_K // X_GROUP
        x_scales = tl.load(x_at + group, mask=group * X_GROUP < K, other=0.0) if MASKED else tl.load(x_at + group)
    return up_scales, up_zeros, gate_scales, gate_zeros, x_scales


@triton.jit
def _mainloop_step(
    acc, gate_acc, up_ptr, up_scales, up_zeros, gate_ptr, gate_scales, gate_zeros, x_scales,
    x_at, code_at, code_k, step, K: tl.constexpr, GATED: tl.constexpr, DECODE: tl.constexpr, FACTOR: tl.constexpr,
    PLANES: tl.constexpr, OPERAND: tl.constexpr, PLAIN: tl.constexpr, SCALE_AT: tl.constexpr, X_SCALE: tl.constexpr,
    GROUPS: tl.constexpr, ZERO_POINTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return both accumulators after one step along K."""
    WORDS: tl.constexpr = BLOCK_K // PLANES
    LOOP: tl.constexpr = SCALE_AT == "loop"
    words: tl.constexpr = K // PLANES
    word = step * WORDS + tl.arange(0, WORDS)
    word_mask = word < words
    at = code_at + word[None, :] * code_k
    up_words = tl.load(up_ptr + at, mask=word_mask[None, :], other=0) if MASKED else tl.load(up_ptr + at)
    up_planes = planes_of(
        up_words, up_scales, up_zeros, DECODE, FACTOR, LOOP, ZERO_POINTS, OPERAND, PLAIN, BLOCK_N, WORDS, GROUPS
    )  # fmt: skip
    if GATED:
        gate_words = tl.load(gate_ptr + at, mask=word_mask[None, :], other=0) if MASKED else tl.load(gate_ptr + at)
        gate_planes = planes_of(
            gate_words, gate_scales, gate_zeros, DECODE, FACTOR, LOOP, ZERO_POINTS, OPERAND, PLAIN, BLOCK_N, WORDS,
            GROUPS,
        )  # fmt: skip
    BY_STEP: tl.constexpr = SCALE_AT == "block" or X_SCALE == "block"
    part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if BY_STEP else acc
    gate_part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if BY_STEP else gate_acc
    for p in tl.static_range(PLANES):
        x_ptrs = x_at + p * words + word[:, None]
        x = tl.load(x_ptrs, mask=word_mask[:, None], other=0.0) if MASKED else tl.load(x_ptrs)
        part = tl.dot(up_planes[p], x, part, input_precision="ieee")
        if GATED:
            gate_part = tl.dot(gate_planes[p], x, gate_part, input_precision="ieee")
        if len(up_planes) > PLANES:
            part = tl.dot(up_planes[PLANES + p], x, part, input_precision="ieee")
            if GATED:
                gate_part = tl.dot(gate_planes[PLANES + p], x, gate_part, input_precision="ieee")
    if BY_STEP:
        part = acc + part * step_scale(up_scales, x_scales, FACTOR, SCALE_AT, X_SCALE)
        if GATED:
            gate_part = gate_acc + gate_part * step_scale(gate_scales, x_scales, FACTOR, SCALE_AT, X_SCALE)
    return part, gate_part


@triton.jit
def step_scale(scales, x_scales, FACTOR: tl.constexpr, SCALE_AT: tl.constexpr, X_SCALE: tl.constexpr):
    """Return the factor of one step's result: the scale of a block of weights, of x, or both."""
    if SCALE_AT != "block":
        return x_scales[None, :]
    elif X_SCALE != "block":
        return FACTOR(scales, True)
    else:
        return FACTOR(scales, True) * x_scales[None, :]


@triton.jit
def planes_of(
    words, scales, points,
    DECODE: tl.constexpr, FACTOR: tl.constexpr, IN_LOOP: tl.constexpr, ZERO_POINTS: tl.constexpr,
    OPERAND: tl.constexpr, PLAIN: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the decoded planes [BLOCK_N, WORDS] of one step along K: one for each column of a word, or two of them,
    whose sum the weights are."""
    factor = words
    zero = words
    if IN_LOOP:
        factor = _broadcast_groups(FACTOR(scales, PLAIN), BLOCK_N, WORDS, GROUPS)
        if ZERO_POINTS:
            zero = _broadcast_groups(_zero_operand(points, PLAIN), BLOCK_N, WORDS, GROUPS)
        else:
            zero = tl.full((BLOCK_N, WORDS), 8.0 if PLAIN else -136.0, tl.float32 if PLAIN else tl.bfloat16)
    return DECODE(words, factor, zero, OPERAND, PLAIN)


@triton.jit
def _zero_operand(points, PLAIN: tl.constexpr):
    if PLAIN:
        return points.to(tl.float32)
    else:
        return (-128.0 - points.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _broadcast_groups(groups, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat [BLOCK_N, GROUPS] along the columns to [BLOCK_N, WORDS]."""
    wide = tl.broadcast_to(groups[:, :, None], (BLOCK_N, GROUPS, WORDS // GROUPS))
    return tl.reshape(wide, (BLOCK_N, WORDS))


@triton.jit
def tile_rows(first, last, BLOCK_M: tl.constexpr):
    """Return the rows of a work tile, with the last one in place of those beyond it, and whether each is its own."""
    row = first + tl.arange(0, BLOCK_M)
    valid = row < last
    return tl.minimum(row, last - 1), valid


@triton.jit
def scale_rows(expert, n, scale_e, scale_n, GROUP_N: tl.constexpr, SCALE_ALIGN: tl.constexpr):
    """Return where the scales of rows of weights begin."""
    # Of a stride like 90 Triton knows only that 16 does not divide it, and would load single bytes.
    return tl.multiple_of(expert * scale_e + (n // GROUP_N)[:, None] * scale_n, (SCALE_ALIGN, SCALE_ALIGN))


@triton.jit
def epilogue(
    acc, codes_scale_ptr, global_ptr, bias_ptr, expert, n, scale_e, scale_n, bias_e, x_scale, weight,
    bias_share, FACTOR: tl.constexpr, POST: tl.constexpr, GROUP_N: tl.constexpr, GLOBAL: tl.constexpr,
    BIAS: tl.constexpr, UNSHIFT: tl.constexpr, X_SCALE: tl.constexpr, ROUTER_WEIGHT_ON_INPUT: tl.constexpr,
):  # fmt: skip
    """Apply to the accumulator [BLOCK_N, BLOCK_M] what multiplies or adds to a whole row or column: scales and bias."""
    if UNSHIFT != 0:
        acc *= 2.0**UNSHIFT
    if POST:
        acc *= FACTOR(tl.load(codes_scale_ptr + expert * scale_e + (n // GROUP_N) * scale_n), True)[:, None]
    if GLOBAL:
        acc *= tl.load(global_ptr + expert)
    if X_SCALE == "row":
        acc *= x_scale[None, :]
    if ROUTER_WEIGHT_ON_INPUT:
        acc *= weight[None, :]
    if BIAS:
        acc += bias_share * tl.load(bias_ptr + expert * bias_e + n).to(tl.float32)[:, None]
    return acc


@triton.jit
def result_at(out_ptr, row, valid, out_n, inside, N: tl.constexpr):
    """Return where a result [BLOCK_M, BLOCK_N] is written, and the mask: valid rows, and columns that are inside."""
    return out_ptr + row.to(tl.int64)[:, None] * N + out_n[None, :], valid[:, None] & inside[None, :]


@triton.jit
def grouped_gemm(
    x_ptr, x_scale_ptr, out_ptr,
    gate_ptr, gate_scale_ptr, gate_zero_ptr, gate_global_ptr, gate_bias_ptr,
    up_ptr, up_scale_ptr, up_zero_ptr, up_global_ptr, up_bias_ptr,
    permuted_to_expanded_ptr, tile_expert_ptr, tile_first_ptr, tile_last_ptr, weight_ptr,
    top_k, x_groups,
    code_e, code_n, code_k, scale_e, scale_n, scale_k, bias_e, out_split, out_gate,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, RAW: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    DECODE: tl.constexpr, FACTOR: tl.constexpr, PLANES: tl.constexpr, OPERAND: tl.constexpr, PLAIN: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ZERO_POINTS: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr, UNSHIFT: tl.constexpr,
    X_SCALE: tl.constexpr, X_GROUP: tl.constexpr, ROUTER_WEIGHT_ON_INPUT: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, OUT_PLANES: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of one expert's weights by one work tile, up to BLOCK_M permuted rows.

    The grid is ``num_tiles * ceil(N / BLOCK_N) * SPLIT_K``; CTAs of unused work tiles return at once. A work tile with
    at most TAIL_BLOCK_M rows is computed only that wide: the last tile of an expert is seldom full.
    x is [rows, K] with its columns in PLANES planes; out is [rows, N] with its columns in OUT_PLANES planes. With RAW,
    out is [SPLIT_K, gate and up, rows, N], before the activation.
    GATHER reads x by token, SCATTER writes expanded rows; otherwise both are permuted rows.
    SCALE_AT: "none", "loop" (scales multiply the codes), "block" (each step's result), "row" (the accumulator).
    X_SCALE, the scales of quantized x: "none", "row" or "block" (one for X_GROUP columns of a row).
    """
    pdl_wait_and_launch(PDL)
    pid = tl.program_id(0)
    num_n_blocks = tl.cdiv(N, BLOCK_N)
    split = pid % SPLIT_K
    n_block = (pid // SPLIT_K) % num_n_blocks
    tile = pid // (SPLIT_K * num_n_blocks)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tile_first_ptr + tile)
    last = tl.load(tile_last_ptr + tile)
    for is_tail in tl.static_range(2 if TAIL_BLOCK_M > 0 else 1):
        if TAIL_BLOCK_M == 0 or (last - first <= TAIL_BLOCK_M) == (is_tail == 1):
            _compute_tile(
                x_ptr, x_scale_ptr, out_ptr, gate_ptr, gate_scale_ptr, gate_zero_ptr, gate_global_ptr, gate_bias_ptr,
                up_ptr, up_scale_ptr, up_zero_ptr, up_global_ptr, up_bias_ptr, permuted_to_expanded_ptr, weight_ptr,
                top_k, x_groups, code_e, code_n, code_k, scale_e, scale_n, scale_k, bias_e, out_split, out_gate,
                split, n_block, expert, first, last,
                N, K, GATED, RAW, ACTIVATION, ALPHA, BETA, LIMIT, DECODE, FACTOR, PLANES, OPERAND, PLAIN,
                SCALE_AT, GROUP_N, GROUP_K, SCALE_ALIGN, ZERO_POINTS, GLOBAL, BIAS, UNSHIFT, X_SCALE, X_GROUP,
                ROUTER_WEIGHT_ON_INPUT, GATHER, SCATTER, OUT_PLANES, SPLIT_K, BLOCK_N,
                TAIL_BLOCK_M if is_tail else BLOCK_M, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _compute_tile(
    x_ptr, x_scale_ptr, out_ptr,
    gate_ptr, gate_scale_ptr, gate_zero_ptr, gate_global_ptr, gate_bias_ptr,
    up_ptr, up_scale_ptr, up_zero_ptr, up_global_ptr, up_bias_ptr, permuted_to_expanded_ptr, weight_ptr,
    top_k, x_groups, code_e, code_n, code_k, scale_e, scale_n, scale_k, bias_e, out_split, out_gate,
    split, n_block, expert, first, last,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, RAW: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    DECODE: tl.constexpr, FACTOR: tl.constexpr, PLANES: tl.constexpr, OPERAND: tl.constexpr, PLAIN: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ZERO_POINTS: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr, UNSHIFT: tl.constexpr,
    X_SCALE: tl.constexpr, X_GROUP: tl.constexpr, ROUTER_WEIGHT_ON_INPUT: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, OUT_PLANES: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    LOOP: tl.constexpr = SCALE_AT == "loop"
    SCALED: tl.constexpr = LOOP or SCALE_AT == "block"
    GROUPS: tl.constexpr = BLOCK_K // GROUP_K if LOOP and BLOCK_K > GROUP_K else 1
    row, valid = tile_rows(first, last, BLOCK_M)
    expanded_row = tl.load(permuted_to_expanded_ptr + row) if GATHER or SCATTER else row
    x_row = (expanded_row // top_k if GATHER else row).to(tl.int64)

    # With OUT_PLANES, a tile's rows of weights are OUT_PLANES apart, so that the columns it writes are contiguous.
    out_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    per_plane = N // OUT_PLANES
    inside = out_n < N
    clamped = tl.minimum(out_n, N - 1)
    n = (clamped % per_plane) * OUT_PLANES + clamped // per_plane if OUT_PLANES > 1 else clamped

    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    MASKED: tl.constexpr = STEPS * BLOCK_K * SPLIT_K != K
    # One scale for the whole tile, if its rows lie within one block of the weights.
    WHOLE: tl.constexpr = SCALE_AT == "block" and GROUP_N % BLOCK_N == 0 and OUT_PLANES == 1
    first_step = split * STEPS
    code_at = expert * code_e + n[:, None].to(tl.int64) * code_n
    if WHOLE:
        scale_at = tl.full((1, 1), 0, tl.int64) + expert * scale_e + n_block * BLOCK_N // GROUP_N * scale_n
    else:
        scale_at = scale_rows(expert, n, scale_e, scale_n, GROUP_N, SCALE_ALIGN)
    x_at = x_ptr + x_row[None, :] * K
    x_scale_at = x_scale_ptr + x_row * x_groups

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    gate_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Scales are loaded one step ahead here: they are too small for the load pipeline, and their latency would show.
    up_scales, up_zeros, gate_scales, gate_zeros, x_scales = _scales(
        up_scale_ptr, up_zero_ptr, gate_scale_ptr, gate_zero_ptr, x_scale_at, scale_at, scale_k, first_step,
        GATED, SCALED, ZERO_POINTS, GROUP_K, GROUPS, X_SCALE, X_GROUP, K, BLOCK_K, MASKED,
    )  # fmt: skip
    for i in range(STEPS):
        step = first_step + i
        acc, gate_acc = _mainloop_step(
            acc, gate_acc, up_ptr, up_scales, up_zeros, gate_ptr, gate_scales, gate_zeros, x_scales,
            x_at, code_at, code_k, step, K, GATED, DECODE, FACTOR, PLANES, OPERAND, PLAIN,
            SCALE_AT, X_SCALE, GROUPS, ZERO_POINTS, BLOCK_N, BLOCK_M, BLOCK_K, MASKED,
        )  # fmt: skip
        up_scales, up_zeros, gate_scales, gate_zeros, x_scales = _scales(
            up_scale_ptr, up_zero_ptr, gate_scale_ptr, gate_zero_ptr, x_scale_at, scale_at, scale_k,
            first_step + tl.minimum(i + 1, STEPS - 1),
            GATED, SCALED, ZERO_POINTS, GROUP_K, GROUPS, X_SCALE, X_GROUP, K, BLOCK_K, MASKED,
        )  # fmt: skip

    x_scale = tl.load(x_scale_at) if X_SCALE == "row" else valid
    weight = tl.load(weight_ptr + expanded_row) if ROUTER_WEIGHT_ON_INPUT else valid
    # The bias counts once: with the first split.
    bias_share = tl.where(split == 0, 1.0, 0.0) if SPLIT_K > 1 else 1.0
    acc = epilogue(
        acc, up_scale_ptr, up_global_ptr, up_bias_ptr, expert, n, scale_e, scale_n, bias_e, x_scale, weight,
        bias_share, FACTOR, SCALE_AT == "row", GROUP_N, GLOBAL, BIAS, UNSHIFT, X_SCALE, ROUTER_WEIGHT_ON_INPUT,
    )  # fmt: skip
    if GATED:
        gate_acc = epilogue(
            gate_acc, gate_scale_ptr, gate_global_ptr, gate_bias_ptr, expert, n, scale_e, scale_n, bias_e, x_scale,
            weight, bias_share, FACTOR, SCALE_AT == "row", GROUP_N, GLOBAL, BIAS, UNSHIFT, X_SCALE,
            ROUTER_WEIGHT_ON_INPUT,
        )  # fmt: skip
    out_row = expanded_row if SCATTER else row
    out_at, mask = result_at(out_ptr + split.to(tl.int64) * out_split, out_row, valid, out_n, inside, N)
    if RAW and GATED:
        tl.store(out_at, tl.trans(gate_acc), mask=mask)
        tl.store(out_at + out_gate, tl.trans(acc), mask=mask)
    else:
        result = activate(gate_acc, acc, ACTIVATION, ALPHA, BETA, LIMIT)
        tl.store(out_at, tl.trans(result).to(out_ptr.dtype.element_ty), mask=mask)
