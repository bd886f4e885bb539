// The writer of rows of h or y, each to a place of its own: a work tile's h in float32, by permuted row, where a scale
// of h is that of a whole row, which no CTA has; and sums of few rows.
#pragma once
#include "rows.cuh"

namespace polymoe {

// The activation, and h of the CTA's blocks of 64 rows of weights from number `n_block` on.
template <int PART, int N_BLOCKS, int BLOCK_M>
__device__ __forceinline__ void store_h_f32(const GemmArgs& args, const float (&acc)[N_BLOCKS][BLOCK_M / 2],
                                            WorkTile tile, int n_block) {
    using Rows = WeightRows<PART, kNeighbours>;
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, width = Rows::width(args);
    const int first = (n_block + warp / 4 * N_BLOCKS) * 4 + warp % 4;  // tile of 16 rows of weights
    for_activation<PART>(args, [&](auto evaluates) {
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const int tile16 = first + m * 4;
            if (tile16 * 16 >= args.n) break;
            const Rows rows(args, tile.expert, tile16);
            float* out = static_cast<float*>(args.out) + static_cast<long long>(tile.row + 2 * t) * width;
#pragma unroll
            for (int n = 0; n < BLOCK_M / 8; ++n) {
                if (n * 8 >= tile.rows) break;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = n * 8 + 2 * t + i;
                    float low = acc[m][4 * n + i], high = acc[m][4 * n + 2 + i];
                    if (row >= tile.rows) continue;
                    rows.template finish<decltype(evaluates)::how>(args, tile.row + row, low, high);
                    float* to = out + static_cast<long long>(n * 8 + i) * width;
                    to[rows.first] = low;
                    if (PART == kUp) to[rows.second] = high;
                }
            }
        }
    });
}

__device__ __forceinline__ void store_value(float* to, float v) { *to = v; }
__device__ __forceinline__ void store_value(uint16_t* to, float v) { *to = f32_to_bf16(v); }

// A tile of 16 rows of weights by 8 rows of x, of which a lane has the sums of two: with input weights or scales, they
// are multiplied by `weights` to rows `to` of out, or nowhere if negative. ROUNDED: y is rounded to bfloat16.
template <class Out, Evaluation HOW, bool ROUNDED, int PART, RowOrder ORDER>
__device__ __forceinline__ void store_rows(const GemmArgs& args, const WeightRows<PART, ORDER>& rows, const float* c,
                                           const int (&to)[2], const float (&weights)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (to[i] < 0) break;
        Out* out = static_cast<Out*>(args.out) + static_cast<long long>(to[i]) * rows.width(args);
        float low = c[i], high = c[2 + i];
        rows.template finish<HOW>(args, to[i], low, high, weights[i]);
        if (PART == kDown && ROUNDED) low = bf16_to_f32(f32_to_bf16(low)), high = bf16_to_f32(f32_to_bf16(high));
        store_value(out + rows.first, low);
        if (PART != kGateUp) store_value(out + rows.second, high);
    }
}

}  // namespace polymoe
