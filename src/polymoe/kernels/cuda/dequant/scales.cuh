// 4-bit weights in registers: words of the layout w4a16_fragments to A operands of mma and wgmma in bfloat16.
//
// A format's type says how many bytes of scales stand beside 64 rows and kScaleBlocks times 64 columns (kScaleBytes),
// what the accumulators are multiplied by at the end (kAccScale), how words of scales become pairs of bfloat16 for rows
// g and g + 8 (`scales`; `scale` picks the pair for 16 columns), and how a word of codes becomes the four registers of
// m16n8k16's A operand, not scaled yet (`codes`). Where the bits lie is described in layouts/cuda/w4a16_fragments.py.
#pragma once
#include "../ptx/memory.cuh"
#include "fp4.cuh"
#include "int4.cuh"

namespace polymoe {

// Bytes of scales for each of the 8 pairs of rows of a tile of 16 rows.
template <class F>
constexpr int kTileScaleBytes = F::kScaleBytes / 32;

// How many blocks of scales stand beside `k` columns.
template <class F>
__device__ __forceinline__ int scale_blocks(int k) {
    return (k + 64 * F::kScaleBlocks - 1) / (64 * F::kScaleBlocks);
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
__device__ __forceinline__ void dequantize(uint32_t (&a)[4], uint32_t word, typename F::Scale scale) {
    F::codes(a, word);
    apply_scale(a, scale);
}

// The scales of one tile of 16 rows.
template <class F>
__device__ __forceinline__ typename F::Scales load_scales(uint32_t smem) {
    uint32_t words[kTileScaleBytes<F> / 4];
    if constexpr (kTileScaleBytes<F> == 4) {
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
__device__ __forceinline__ void load_scale_words(uint32_t (&words)[2][kTileScaleBytes<F> / 4], uint32_t smem) {
    if constexpr (kTileScaleBytes<F> == 4) {
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
