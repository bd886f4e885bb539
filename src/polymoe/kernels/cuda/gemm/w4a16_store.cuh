// How w4a16_wgmma stores a tile of 16 rows of weights.
//
// Eight rows of x take a chain of instructions that wait for each other, and a scheduler has few warps. So several
// times eight rows are in flight.
#pragma once
#include "../epilogue.cuh"

namespace polymoe {

template <int PART, int BLOCK_M, int TOGETHER>
__device__ __forceinline__ void store_rows_together(const TileEpilogue& epilogue, const float* acc, int tile16) {
    static_assert(BLOCK_M / 8 % TOGETHER == 0);
    const GemmArgs& args = epilogue.args;
    const WorkTile tile = epilogue.tile;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool odd = t % 2;
    uint16_t* out = static_cast<uint16_t*>(args.out);
    if (PART == kDown) {  // neighbours exchange halves: a lane stores 8 bytes, and four lanes a sector of 32 bytes
        out += static_cast<long long>(tile.row + g) * args.n + tile16 * 16 + (odd ? 8 + 2 * (t - 1) : 2 * t);
    } else {  // 512 elements from eight rows to the next
        out += static_cast<long long>(tile.padded_row) * ((args.n / 2 + 63) / 64 * 64) +
               permuted_tile_offset(g, tile16 * 8 + 2 * t, tile.rows);
    }
    const long long step = PART == kDown ? 8LL * args.n : 512;
#pragma unroll
    for (int m0 = 0; m0 < BLOCK_M; m0 += 8 * TOGETHER) {
        if (m0 >= tile.rows) break;
        uint2 v[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const float* c = acc + m0 / 2 + i * 4;
            float low[2], high[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                low[j] = c[j] * epilogue.low_scale + epilogue.low_bias;
                high[j] = c[2 + j] * epilogue.high_scale + epilogue.high_bias;
            }
            if (PART == kDown) {
                v[i].x = movmatrix_trans(pack_bf16x2(low[0], low[1]));
                v[i].y = movmatrix_trans(pack_bf16x2(high[0], high[1]));
            } else {
                v[i].x = movmatrix_trans(
                    pack_bf16x2(fast_swiglu(args, low[0], high[0]), fast_swiglu(args, low[1], high[1])));
            }
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (PART == kDown) {
                const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? v[i].x : v[i].y, 1);
                v[i] = odd ? make_uint2(other, v[i].y) : make_uint2(v[i].x, other);
            }
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (m0 + i * 8 + g < tile.rows) {
                if (PART == kDown) {
                    *reinterpret_cast<uint2*>(out) = v[i];
                } else {
                    *reinterpret_cast<uint32_t*>(out) = v[i].x;
                }
            }
            out += step;
        }
    }
}

// Writes h or y for the tile number `tile16` by all rows of the work tile. For up to 32 rows it makes no difference.
template <int PART, int BLOCK_M>
__device__ __forceinline__ void store_w4a16_tile(const TileEpilogue& epilogue, const float* acc, int tile16) {
    constexpr int kTogether = BLOCK_M == 32 ? 1 : 4;
    if constexpr (PART == kDown) {
        store_rows_together<PART, BLOCK_M, kTogether>(epilogue, acc, tile16);
    } else {
        if constexpr (PART == kGateUp && kTogether > 1) {
            if (epilogue.args.activation == kSwiglu && !epilogue.args.router_weights) {
                store_rows_together<PART, BLOCK_M, kTogether>(epilogue, acc, tile16);
                return;
            }
        }
        store_tile<PART, BLOCK_M>(epilogue, acc, tile16);
    }
}

}  // namespace polymoe
