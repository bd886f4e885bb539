// The writer of bfloat16: h to permuted tiles, and y by permuted row.
#pragma once
#include "../pipeline.cuh"
#include "../ptx/ldmatrix.cuh"
#include "rows.cuh"

namespace polymoe {

// Where a permuted row number `row` of a work tile has its column number `column`.
template <int PART>
__device__ __forceinline__ uint16_t* bf16_at(const GemmArgs& args, WorkTile tile, int row, int column) {
    uint16_t* out = static_cast<uint16_t*>(args.out);
    if (PART == kDown) return out + static_cast<long long>(tile.row + row) * args.n + column;
    const int width = PART == kGateUp ? args.n / 2 : args.n;
    return out + static_cast<long long>(tile.padded_row) * ((width + 63) / 64 * 64) +
           permuted_tile_offset(row, column, tile.rows);
}

// Writes the tile number `tile16` of 16 rows of weights by all rows of the work tile. A lane stores 4 bytes of a row of
// h, of gate and up, or 8 bytes, or twice 4: where rows of weights are in halves and out is y, neighbours exchange
// theirs first, so that four lanes store a sector of 32 bytes.
//
// Eight rows of x take a chain of instructions that wait for each other, and a scheduler has few warps: TOGETHER times
// eight rows are in flight. WEIGHTED: router weights may multiply the input.
template <int BLOCK_M, int TOGETHER, Evaluation HOW, bool WEIGHTED, int PART, RowOrder ORDER>
__device__ __forceinline__ void store_bf16(const GemmArgs& args, WorkTile tile, const WeightRows<PART, ORDER>& rows,
                                           const float* acc, int tile16) {
    static_assert(BLOCK_M / 8 % TOGETHER == 0);
    constexpr bool kExchanges = PART == kDown && ORDER == kHalves, kTwice = PART == kUp && ORDER == kHalves;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool odd = t % 2;
    int column = tile16 * rows.kColumns + 2 * t;
    if (PART != kGateUp && ORDER == kNeighbours) column += 2 * t;
    if (kExchanges && odd) column += 6;
    uint16_t* out = bf16_at<PART>(args, tile, g, column);
    uint16_t* second_out = kTwice ? bf16_at<PART>(args, tile, g, column + 8) : nullptr;
    const long long step = PART == kDown ? 8LL * args.n : 512;  // from eight rows to the next
#pragma unroll
    for (int m0 = 0; m0 < BLOCK_M; m0 += 8 * TOGETHER) {
        if (m0 >= tile.rows) break;
        uint2 v[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const float* c = acc + m0 / 2 + i * 4;
            float low[2] = {c[0], c[1]}, high[2] = {c[2], c[3]}, weights[2] = {1.0f, 1.0f};
            const int row = m0 + i * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (WEIGHTED && args.router_weights) weights[j] = input_weight(args, tile, row + j);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                rows.template finish<HOW>(args, tile.row + row + j, low[j], high[j], weights[j]);
            }
            v[i].x = movmatrix_trans(pack_bf16x2(low[0], low[1]));
            if (PART != kGateUp) v[i].y = movmatrix_trans(pack_bf16x2(high[0], high[1]));
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (!kExchanges) break;
            const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? v[i].x : v[i].y, 1);
            v[i] = odd ? make_uint2(other, v[i].y) : make_uint2(v[i].x, other);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (m0 + i * 8 + g < tile.rows) {
                if (PART == kGateUp || kTwice) {
                    *reinterpret_cast<uint32_t*>(out) = v[i].x;
                    if (kTwice) *reinterpret_cast<uint32_t*>(second_out) = v[i].y;
                } else {
                    *reinterpret_cast<uint2*>(out) = v[i];
                }
            }
            out += step, second_out += kTwice ? step : 0;
        }
    }
}

// Writes y for the block number `n_block` of 64 rows of weights of whole bytes, whose sums are complete.
template <int BLOCK_M, int TOGETHER>
__device__ __forceinline__ void store_y(const GemmArgs& args, const float (&acc)[BLOCK_M / 2], WorkTile tile,
                                        int n_block) {
    const int tile16 = n_block * 4 + threadIdx.x / 32 % 4;
    const WeightRows<kDown, kNeighbours> rows(args, tile.expert, tile16);
    store_bf16<BLOCK_M, TOGETHER, kFastSwiglu, false>(args, tile, rows, acc, tile16);
}

}  // namespace polymoe
