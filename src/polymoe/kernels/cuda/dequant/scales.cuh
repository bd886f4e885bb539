// Weights in registers: words of the layouts w4a16_fragments and w8a16_fragments to A operands of mma and wgmma in
// bfloat16.
//
// A format's type says how many bytes of scales stand beside kScaleBlocks blocks of 64 rows (kScaleBytes), what the
// accumulators are multiplied by at the end (kAccScale), how words of scales become pairs of bfloat16 for rows g and
// g + 8 (`scales`; `scale` picks the pair for 16 of a block's columns), and how kStepWords words of codes become the
// four registers of m16n8k16's A operand, not scaled yet (`codes`). Where the bits lie is described in
// layouts/cuda/w4a16_fragments.py.
#pragma once
#include "../ptx/memory.cuh"
#include "block_columns.cuh"
#include "fp4.cuh"
#include "int4.cuh"
#include "mxfp8.cuh"

namespace polymoe {

// Bytes of scales for each of the 8 pairs of rows of a tile of 16 rows.
template <class F>
constexpr int kTileScaleBytes = F::kScaleBytes / 32;

// Words that hold them.
template <class F>
constexpr int kScaleWords = (kTileScaleBytes<F> + 3) / 4;

// How many blocks of scales stand beside `k` columns.
template <class F>
__device__ __forceinline__ int scale_blocks(int k) {
    constexpr int kColumns = kBlockColumns<F> * F::kScaleBlocks;
    return (k + kColumns - 1) / kColumns;
}

// 4 instructions.
__device__ __forceinline__ void apply_scale(uint32_t (&a)[4], uint32_t scale) {
    a[0] = mul_bf16x2_low(a[0], scale), a[1] = mul_bf16x2_high(a[1], scale);
    a[2] = mul_bf16x2_low(a[2], scale), a[3] = mul_bf16x2_high(a[3], scale);
}

// 4 instructions.
__device__ __forceinline__ void apply_scale(uint32_t (&a)[4], ScaleAndOffset by) {
    a[0] = fma_bf16x2_low(a[0], by.scale, by.offset), a[1] = fma_bf16x2_high(a[1], by.scale, by.offset);
    a[2] = fma_bf16x2_low(a[2], by.scale, by.offset), a[3] = fma_bf16x2_high(a[3], by.scale, by.offset);
}

template <class F>
__device__ __forceinline__ void dequantize(uint32_t (&a)[4], const uint32_t* words, typename F::Scale scale) {
    F::codes(a, words);
    apply_scale(a, scale);
}

// The scales of one tile of 16 rows.
template <class F>
__device__ __forceinline__ typename F::Scales load_scales(uint32_t smem) {
    uint32_t words[kScaleWords<F>];
    if constexpr (kTileScaleBytes<F> == 2) {
        words[0] = ld_shared_u16(smem);
    } else if constexpr (kTileScaleBytes<F> == 4) {
        words[0] = ld_shared(smem);
    } else if constexpr (kTileScaleBytes<F> == 8) {
        const uint2 v = ld_shared_v2(smem);
        words[0] = v.x, words[1] = v.y;
    } else {
        const uint4 v = ld_shared_v4(smem);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
    return F::scales(words);
}

// The words of two tiles' scales, still to be decoded.
template <class F>
__device__ __forceinline__ void load_scale_words(uint32_t (&words)[2][kScaleWords<F>], uint32_t smem) {
    if constexpr (kTileScaleBytes<F> == 2) {
        words[0][0] = ld_shared(smem), words[1][0] = words[0][0] >> 16;
    } else if constexpr (kTileScaleBytes<F> == 4) {
        const uint2 v = ld_shared_v2(smem);
        words[0][0] = v.x, words[1][0] = v.y;
    } else if constexpr (kTileScaleBytes<F> == 8) {
        const uint4 v = ld_shared_v4(smem);
        words[0][0] = v.x, words[0][1] = v.y, words[1][0] = v.z, words[1][1] = v.w;
    } else {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint4 v = ld_shared_v4(smem + tile * 16);
            words[tile][0] = v.x, words[tile][1] = v.y, words[tile][2] = v.z, words[tile][3] = v.w;
        }
    }
}

}  // namespace polymoe
