// The writers of sums whose MMA has rows of x as M and rows of weights as N: h in E4M3 to permuted tiles, which
// e4m3_tiles.cuh describes, or in float32 by permuted row, and y in bfloat16 by permuted row.
//
// Of each 64 rows of x and 128 rows of weights, a lane 4g + t of a warpgroup's warp w has rows 16w + g and 16w + g + 8,
// of each 8 rows of weights two neighbours, 2t and 2t + 1. Gate and up are interleaved by 8 rows, so that a lane has
// both; other rows are permuted so that of each 16 a lane has four neighbouring columns of the result.
#pragma once
#include "../dequant/e4m3.cuh"
#include "../e4m3_scale.cuh"
#include "../pipeline.cuh"
#include "../ptx/memory.cuh"
#include "activation.cuh"
#include "hooks.cuh"
#include "rows.cuh"

namespace polymoe {

// [64 rows of x][8 rows of weights, row g or g + 8, neighbour].
template <int BLOCK_M>
using RowSums = float[BLOCK_M / 64][64];

// Calls run(m, i, row) for the rows of a work tile that this lane has: number i of two in block m.
template <int BLOCK_M, class Run>
__device__ __forceinline__ void for_lane_rows(WorkTile tile, Run run) {
    const int first = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < BLOCK_M / 64; ++m) {
        if (m * 64 >= tile.rows) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) run(m, i, m * 64 + i * 8 + first);
    }
}

// Columns of h or y, and the first of them that block `n_block` of 64 rows of weights has.
template <int PART>
__device__ __forceinline__ int width_of(const GemmArgs& args) {
    return PART == kGateUp ? args.n / 2 : args.n;
}
template <int PART>
__device__ __forceinline__ int first_column(int n_block) {
    return n_block * (PART == kGateUp ? 32 : 64);
}

// The first of the two columns of the result that a lane has in 8 rows of weights, number j of 16.
template <int PART>
__device__ __forceinline__ int lane_column(int j) {
    const int t = threadIdx.x % 4;
    return PART == kGateUp ? j / 2 * 8 + 2 * t : j / 2 * 16 + 4 * t + j % 2 * 2;
}

template <int PART, int BLOCK_M>
__device__ __forceinline__ void add_bias(const GemmArgs& args, RowSums<BLOCK_M>& acc, WorkTile tile, int n_block) {
    if (args.bias_dtype == kNone) return;
    const long long first = static_cast<long long>(tile.expert) * width_of<PART>(args) + first_column<PART>(n_block);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const void* bias = PART == kGateUp && j % 2 ? args.up_bias : args.bias;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float v = load_bias(bias, args.bias_dtype, first + lane_column<PART>(j) + c);
            for_lane_rows<BLOCK_M>(tile, [&](int m, int i, int) { acc[m][4 * j + 2 * i + c] += v; });
        }
    }
}

// Biases and the activation: h replaces the gate's sums.
template <int BLOCK_M>
__device__ __forceinline__ void activate_row_sums(const GemmArgs& args, RowSums<BLOCK_M>& acc, WorkTile tile,
                                                  int n_block) {
    add_bias<kGateUp, BLOCK_M>(args, acc, tile, n_block);
    const int first = first_column<kGateUp>(n_block);
    for_activation<kGateUp>(args, [&](auto evaluates) {
        for_lane_rows<BLOCK_M>(tile, [&](int m, int i, int row) {
#pragma unroll
            for (int j = 0; j < 16; j += 2) {
                float* sums = &acc[m][4 * j + 2 * i];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int column = first + lane_column<kGateUp>(j) + c;
                    before_activation(args, {tile.expert, tile.row + row, column, column}, sums[c], sums[4 + c]);
                    activate<kGateUp, decltype(evaluates)::how>(args, sums[c], sums[4 + c]);
                }
            }
        });
    });
}

// Four values of 16 bits in each of four neighbouring lanes, two a word, transposed: lane t gets value t of all four.
__device__ __forceinline__ uint2 transpose_quad(uint32_t first, uint32_t second) {
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? first : second, 2);
    const uint2 pair = upper ? make_uint2(other, second) : make_uint2(first, other);  // of lanes t % 2 and t % 2 + 2
    const uint32_t even_values = prmt(pair, 0x5410), odd_values = prmt(pair, 0x7632);
    const uint32_t mine = odd ? odd_values : even_values;
    const uint32_t theirs = __shfl_xor_sync(0xFFFFFFFFu, odd ? even_values : odd_values, 1);
    const uint2 lanes = odd ? make_uint2(theirs, mine) : make_uint2(mine, theirs);  // 0 and 2; 1 and 3
    return make_uint2(prmt(lanes, 0x5410), prmt(lanes, 0x7632));
}

// The activation, and 64 columns of h of both warpgroups' 128, which share a scale. `maxima`: of each warpgroup's rows,
// of a buffer that alternates from tile to tile.
template <int BLOCK_M>
__device__ __forceinline__ void store_h_tiles(const GemmArgs& args, RowSums<BLOCK_M>& acc, WorkTile tile, int n_block,
                                              float (&maxima)[w8::kWarpgroups][BLOCK_M]) {
    const int warpgroup = threadIdx.x / 128, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    activate_row_sums<BLOCK_M>(args, acc, tile, n_block);
    for_lane_rows<BLOCK_M>(tile, [&](int m, int i, int row) {
        float most = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; ++j) most = max_nan(most, fabsf(acc[m][j / 2 * 8 + 2 * i + j % 2]));
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) most = max_nan(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
        if (t == 0) maxima[warpgroup][row] = most;
    });
    named_barrier_sync(1, w8::kWarps * 32);
    const int padded = padded_rows(tile.rows), blocks = args.n / 256, block = n_block / 4;
    uint8_t* out = static_cast<uint8_t*>(args.out) + static_cast<long long>(tile.padded_row) * blocks * kE4m3RowBytes;
    float* scales = reinterpret_cast<float*>(out + blocks * padded * 128) + block * padded;
    out += block * padded * 128 + t % 2 * 8;
    for_lane_rows<BLOCK_M>(tile, [&](int m, int i, int row) {
        const float most = max_nan(maxima[0][row], maxima[1][row]);
        const float factor = most == 0.0f ? 0.0f : fast_divide(448.0f, most);
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* h = &acc[m][16 * j + 2 * i];
            words[j] = pack_e4m3x2(h[0] * factor, h[1] * factor) | pack_e4m3x2(h[8] * factor, h[9] * factor) << 16;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2 codes = transpose_quad(words[2 * half], words[2 * half + 1]);
            const int chunk = (warpgroup * 4 + half * 2 + t / 2) ^ g;
            if (row < tile.rows) *reinterpret_cast<uint2*>(out + row * 128 + chunk * 16) = codes;
        }
        if (warpgroup == 0 && t == 0 && row < tile.rows) scales[row] = scale_of(most);
    });
}

// The activation, and 64 columns of h in float32.
template <int BLOCK_M>
__device__ __forceinline__ void store_h_rows(const GemmArgs& args, RowSums<BLOCK_M>& acc, WorkTile tile, int n_block) {
    activate_row_sums<BLOCK_M>(args, acc, tile, n_block);
    const int width = width_of<kGateUp>(args), first = first_column<kGateUp>(n_block);
    for_lane_rows<BLOCK_M>(tile, [&](int m, int i, int row) {
        if (row >= tile.rows) return;
        float* out = static_cast<float*>(args.out) + static_cast<long long>(tile.row + row) * width + first;
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const float* h = &acc[m][4 * j + 2 * i];
            *reinterpret_cast<float2*>(out + lane_column<kGateUp>(j)) = make_float2(h[0], h[1]);
        }
    });
}

// y, with its bias.
template <int BLOCK_M>
__device__ __forceinline__ void store_y_rows(const GemmArgs& args, RowSums<BLOCK_M>& acc, WorkTile tile, int n_block) {
    add_bias<kDown, BLOCK_M>(args, acc, tile, n_block);
    const int first = first_column<kDown>(n_block);
    for_lane_rows<BLOCK_M>(tile, [&](int m, int i, int row) {
        if (row >= tile.rows) return;
        uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(tile.row + row) * args.n + first;
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const int column = lane_column<kDown>(j);
            float* y = &acc[m][4 * j + 2 * i];
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const int at = first + column + 2 * pair;
                after_down(args, {tile.expert, tile.row + row, at, at + 1}, y[4 * pair], y[4 * pair + 1]);
            }
            *reinterpret_cast<uint2*>(out + column) = make_uint2(pack_bf16x2(y[0], y[1]), pack_bf16x2(y[4], y[5]));
        }
    });
}

}  // namespace polymoe
