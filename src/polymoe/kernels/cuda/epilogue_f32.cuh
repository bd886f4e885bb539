// The epilogue that writes h in float32, by permuted row: where a scale of h is that of a whole row, which no CTA has.
#pragma once
#include "epilogue.cuh"

namespace polymoe {

// One kind of activation, so that the code that runs is short: of all kinds in one loop it would leave the instruction
// cache.
template <int PART, bool SWIGLU, int N_BLOCKS, int BLOCK_M>
__device__ __forceinline__ void store_activated(const GemmArgs& args, const float (&acc)[N_BLOCKS][BLOCK_M / 2],
                                                WorkTile tile, int n_block) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int width = PART == kGateUp ? args.n / 2 : args.n;
    const int first = (n_block + warp / 4 * N_BLOCKS) * 4 + warp % 4;  // tile of 16 rows of weights
#pragma unroll
    for (int m = 0; m < N_BLOCKS; ++m) {
        const int tile16 = first + m * 4;
        if (tile16 * 16 >= args.n) break;
        const int low = PART == kGateUp ? tile16 * 8 + g : tile16 * 16 + tile_row<PART>(g, 0);
        const int high = PART == kGateUp ? low : tile16 * 16 + tile_row<PART>(g, 1);
        const long long bias = static_cast<long long>(tile.expert) * width;
        const float low_bias = load_bias(args.bias, args.bias_dtype, bias + low);
        const float high_bias = load_bias(PART == kGateUp ? args.up_bias : args.bias, args.bias_dtype, bias + high);
        float* out = static_cast<float*>(args.out) + static_cast<long long>(tile.row + 2 * t) * width;
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n) {
            if (n * 8 >= tile.rows) break;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float first_h = acc[m][4 * n + i] + low_bias, second_h = acc[m][4 * n + 2 + i] + high_bias;
                if (n * 8 + 2 * t + i >= tile.rows) continue;
                float* to = out + static_cast<long long>(n * 8 + i) * width;
                if (PART == kUp) {
                    const float up = max_nan(first_h, 0.0f), second_up = max_nan(second_h, 0.0f);
                    to[low] = up * up, to[high] = second_up * second_up;
                } else {
                    to[low] = SWIGLU ? fast_swiglu(args, first_h, second_h) : gated_activation(args, first_h, second_h);
                }
            }
        }
    }
}

// The activation, and h of the CTA's blocks of 64 rows of weights from number `n_block` on.
template <int PART, int N_BLOCKS, int BLOCK_M>
__device__ __forceinline__ void store_h_f32(const GemmArgs& args, const float (&acc)[N_BLOCKS][BLOCK_M / 2],
                                            WorkTile tile, int n_block) {
    if (PART == kUp || args.activation == kSwiglu) {
        store_activated<PART, true, N_BLOCKS, BLOCK_M>(args, acc, tile, n_block);
    } else {
        store_activated<PART, false, N_BLOCKS, BLOCK_M>(args, acc, tile, n_block);
    }
}

}  // namespace polymoe
