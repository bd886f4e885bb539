// The writer of h in E4M3, with a float32 scale for each row and 128 columns, to permuted tiles.
//
// A tile is a work tile's rows by 128 columns of h: 128 bytes per row, swizzled, with room for a multiple of 8 rows.
// Behind a work tile's tiles stand their rows' scales. 128 columns of h are the 256 rows of weights, gate and up
// interleaved, that a CTA computes at a time; its warps exchange the maxima of each row.
#pragma once
#include "../e4m3_scale.cuh"
#include "../pipeline.cuh"
#include "../ptx/ldmatrix.cuh"
#include "rows.cuh"

namespace polymoe {

// The maximum over lanes 4g + t for each t, of COUNT values at once: halves are exchanged as long as COUNT is even,
// after which a lane has `values_left` of them. Returns the number of the first.
template <int COUNT, int LANES>
__device__ __forceinline__ int max_over_lanes(float* values) {
    if constexpr (LANES == 32) {
        return 0;
    } else if constexpr (COUNT % 2 == 0) {
        const bool upper = threadIdx.x & LANES;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float mine = upper ? values[i + COUNT / 2] : values[i];
            const float theirs = upper ? values[i] : values[i + COUNT / 2];
            values[i] = max_nan(mine, __shfl_xor_sync(0xFFFFFFFFu, theirs, LANES));
        }
        return (upper ? COUNT / 2 : 0) + max_over_lanes<COUNT / 2, LANES * 2>(values);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = max_nan(values[i], __shfl_xor_sync(0xFFFFFFFFu, values[i], LANES));
        return max_over_lanes<COUNT, LANES * 2>(values);
    }
}

__host__ __device__ constexpr int values_left(int count) {
    for (int lanes = 4; lanes < 32 && count % 2 == 0; lanes *= 2) count /= 2;
    return count;
}

// The activation, and 128 columns of h.
//
// C says what the weights' accumulators are multiplied by (`row_scale`), and in which order h has its columns:
// kSecondHalf, where the second 8 of 16 columns begin, and kPair, from one pair of columns to the next. `n_block` is
// the CTA's first block of 64 rows of weights. `amax` is [3, BLOCK_M] in shared memory, at first zeros; `buffer` says
// which of the three this tile uses.
template <int WARPGROUPS, int N_BLOCKS, int BLOCK_M, class C>
__device__ __forceinline__ void store_h_e4m3(const GemmArgs& args, float (&acc)[N_BLOCKS][BLOCK_M / 2], WorkTile tile,
                                             int n_block, const uint8_t* scales, float* amax, int buffer) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, tiles16 = args.n / 16;
    const int first = (n_block + warp / 4 * N_BLOCKS) * 4 + warp % 4;  // tile of 16 rows of weights, 8 columns of h
    const int width = args.n / 2;
    float row_max[BLOCK_M / 4] = {};  // of rows 2t and 2t + 1 of each 8
#pragma unroll
    for (int m = 0; m < N_BLOCKS; ++m) {
        const int tile16 = first + m * 4;
        if (tile16 >= tiles16) break;
        const WeightRows<kGateUp, kHalves> rows(
            args, tile.expert, tile16, C::row_scale(scales + tile16 * 16 + g, args.expert_scale, tile.expert),
            C::row_scale(scales + tile16 * 16 + 8 + g, args.up_expert_scale, tile.expert));
        for_activation<kGateUp>(args, [&](auto evaluates) {
#pragma unroll
            for (int n = 0; n < BLOCK_M / 8; ++n) {
                if (n * 8 >= tile.rows) break;
                float* c = &acc[m][4 * n];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float up = c[2 + i];
                    rows.template finish<decltype(evaluates)::how>(args, tile.row + n * 8 + 2 * t + i, c[i], up);
                }
            }
        });
#pragma unroll
        for (int i = 0; i < BLOCK_M / 4; ++i) row_max[i] = max_nan(row_max[i], fabsf(acc[m][i / 2 * 4 + i % 2]));
    }
    float* tile_amax = amax + buffer * BLOCK_M;
    const int value = max_over_lanes<BLOCK_M / 4, 4>(row_max);
#pragma unroll
    for (int i = 0; i < values_left(BLOCK_M / 4); ++i) {  // the bits of positive floats are ordered as the floats are
        atomicMax(reinterpret_cast<uint32_t*>(tile_amax) + (value + i) / 2 * 8 + 2 * t + (value + i) % 2,
                  __float_as_uint(row_max[i]));
    }
    named_barrier_sync(1, WARPGROUPS * 128);
    // All threads have read the maxima of the tile before, whose buffer is the next but one.
    if (threadIdx.x < BLOCK_M) amax[(buffer + 2) % 3 * BLOCK_M + threadIdx.x] = 0.0f;
    const int padded = padded_rows(tile.rows), blocks = (width + 127) / 128;
    uint8_t* out = static_cast<uint8_t*>(args.out) + static_cast<long long>(tile.padded_row) * blocks * kE4m3RowBytes;
    if (threadIdx.x < tile.rows) {
        reinterpret_cast<float*>(out + blocks * padded * 128)[n_block / 4 * padded + threadIdx.x] =
            scale_of(tile_amax[threadIdx.x]);
    }
    out += n_block / 4 * padded * 128 + g * 128;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
        if (n * 8 >= tile.rows) break;
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float most = tile_amax[n * 8 + 2 * t + i];
            factor[i] = most == 0.0f ? 0.0f : fast_divide(448.0f, most);
        }
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const float* c = &acc[m][4 * n];
            const uint32_t codes = pack_e4m3x2(c[0] * factor[0], c[1] * factor[1]);
            // Transposed: columns 2t and 2t + 1 of row g.
            const uint32_t pair = movmatrix_trans((codes & 0xFF) | (codes & 0xFF00) << 8);
            const int inner = (first + m * 4) % 16, chunk = (inner / 2) ^ g;
            if (n * 8 + g >= tile.rows || first + m * 4 >= tiles16) continue;
            *reinterpret_cast<uint16_t*>(out + n * 1024 + chunk * 16 + inner % 2 * C::kSecondHalf + C::kPair * t) =
                static_cast<uint16_t>(prmt(make_uint2(pair, 0), 0x4420));
        }
    }
}

}  // namespace polymoe
