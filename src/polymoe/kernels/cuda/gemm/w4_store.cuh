// How w4a8 stores a tile of 16 rows of weights of down.
#pragma once
#include "../epilogue.cuh"

namespace polymoe {

// Writes y for the tile number `tile16` by all rows of the work tile, by permuted row. A lane has rows 2t and 2t + 1 of
// the tile's first eight and of its last eight, for row g of x. Neighbours exchange halves, so that a lane stores 8
// bytes, and four lanes a sector of 32 bytes.
template <int BLOCK_M>
__device__ __forceinline__ void store_y_tile(const TileEpilogue& epilogue, const float* acc, int tile16) {
    const GemmArgs& args = epilogue.args;
    const WorkTile tile = epilogue.tile;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool odd = t % 2;
    const int column = tile16 * 16 + (odd ? 8 + 2 * (t - 1) : 2 * t);
    uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(tile.row + g) * args.n + column;
    const long long step = 8LL * args.n;
#pragma unroll
    for (int m0 = 0; m0 < BLOCK_M; m0 += 8) {
        if (m0 >= tile.rows) break;
        float low[2], high[2];
        epilogue.scale<kDown>(acc + m0 / 2, m0, low, high);
        const uint32_t first = movmatrix_trans(pack_bf16x2(low[0], low[1]));
        const uint32_t second = movmatrix_trans(pack_bf16x2(high[0], high[1]));
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
        if (m0 + g < tile.rows) {
            *reinterpret_cast<uint2*>(out) = odd ? make_uint2(other, second) : make_uint2(first, other);
        }
        out += step;
    }
}

}  // namespace polymoe
