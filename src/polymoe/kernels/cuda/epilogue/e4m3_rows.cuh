// The writer of h in E4M3 by permuted row, with a float32 scale for each 128 columns, as w8a8_f16 reads it: codes and
// behind them the scales (w8::row_bytes). 128 columns of h are the 256 rows of weights, gate and up interleaved, that a
// CTA computes at a time; its warps exchange the maxima of each row.
#pragma once
#include "../dequant/e4m3.cuh"
#include "../e4m3_scale.cuh"
#include "../pipeline.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/ldmatrix.cuh"
#include "rows.cuh"

namespace polymoe {

// What a CTA's warps exchange of the rows of h.
template <int BLOCK_M>
struct RowMaxima {
    float of_warp[w8::kWarps][BLOCK_M];
    float2 scale[BLOCK_M];  // and its reciprocal
};

// The activation, and 128 columns of h with their scales.
template <int BLOCK_M>
__device__ __forceinline__ void store_h_e4m3_rows(const GemmArgs& args, float (&acc)[w8::kNBlocks][BLOCK_M / 2],
                                                  WorkTile tile, int n_tile, RowMaxima<BLOCK_M>& maxima) {
    using Rows = WeightRows<kGateUp, kNeighbours>;
    static_assert(w8::kNBlocks == 2);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, columns = args.n / 2;
    const int tile16 = n_tile * 16 + warp / 4 * w8::kNBlocks * 4 + warp % 4;
    const Rows rows[2] = {Rows(args, tile.expert, tile16), Rows(args, tile.expert, tile16 + 4)};
    for_activation<kGateUp>(args, [&](auto evaluates) {
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n) {
            if (n * 8 >= tile.rows) break;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float most = 0.0f;
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    float *c = &acc[m][4 * n + i], up = c[2];
                    rows[m].template finish<decltype(evaluates)::how>(args, tile.row + n * 8 + 2 * t + i, *c, up);
                    most = fmaxf(most, fabsf(*c));
                }
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
                }
                if (g == 0) maxima.of_warp[warp][n * 8 + 2 * t + i] = most;
            }
        }
    });
    named_barrier_sync(1, w8::kWarps * 32);
    // Anew for each tile: what follows from it would need registers beside the main loop.
    const int bytes = opaque(w8::row_bytes(columns));
    uint8_t* out = static_cast<uint8_t*>(args.out) + static_cast<long long>(tile.row) * bytes;
    if (threadIdx.x < tile.rows) {
        float scale = 0.0f;
#pragma unroll
        for (int other = 0; other < w8::kWarps; ++other) scale = fmaxf(scale, maxima.of_warp[other][threadIdx.x]);
        scale = scale_of(scale);
        maxima.scale[threadIdx.x] = make_float2(scale, inverse_of(scale));
        reinterpret_cast<float*>(out + static_cast<long long>(threadIdx.x) * bytes + columns)[n_tile] = scale;
    }
    named_barrier_sync(1, w8::kWarps * 32);
    out += static_cast<long long>(g) * bytes + tile16 * 8 + 2 * t;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
        if (n * 8 >= tile.rows) break;
        uint32_t v = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 scale = maxima.scale[n * 8 + 2 * t + i];
            v |= pack_e4m3x2(exact_divide(acc[0][4 * n + i], scale.x, scale.y),
                             exact_divide(acc[1][4 * n + i], scale.x, scale.y))
                 << 16 * i;
        }
        v = movmatrix_trans(v);  // columns 2t and 2t + 1 of a row, each of m = 0 and 1
        if (n * 8 + g < tile.rows) {
            uint16_t* to = reinterpret_cast<uint16_t*>(out + static_cast<long long>(n * 8) * bytes);
            to[0] = static_cast<uint16_t>((v & 0xFF) | (v >> 8 & 0xFF00));
            to[16] = static_cast<uint16_t>((v >> 8 & 0xFF) | (v >> 16 & 0xFF00));
        }
    }
}

}  // namespace polymoe
