// E4M3 weights with float32 scales: tiles of 256 rows of weights, 128 columns per stage, for two consumer warpgroups
// and four producer warps. Where weights lie is described in layouts/cuda/w8_swizzle128.py.
#pragma once
#include "../gemm/args.cuh"
#include "../sizes.cuh"

namespace polymoe {

// What shares a scale: 128 x 128 weights, and 128 columns of a row of x; or a row of weights, and a row of x.
enum Scales { kBlock128, kChannel };

namespace w8 {

constexpr int kWarpgroups = 2, kNBlocks = 2, kWarps = kWarpgroups * 4;  // blocks of 64 rows of weights a warpgroup
constexpr int kBlockBytes = 64 * kE4m3BlockK, kTileBytes = kWarpgroups * kNBlocks * kBlockBytes;
constexpr int kTile16Bytes = 16 * kE4m3BlockK, kPartBytes = 32;  // of 16 rows; of 32 columns of a row

// Where a lane's address for ldmatrix_x4 lies, of 16 rows and the first 32 columns of a block. For the next ones, the
// bits of kPartBytes times their number are flipped. A lane gets columns 4t to 4t + 3 of rows g and g + 8, and the same
// 16 columns further on.
__device__ __forceinline__ uint32_t lane_piece() {
    const uint32_t lane = threadIdx.x % 32, row = lane % 16;
    return row * kE4m3BlockK + ((lane / 16) ^ (row % 8)) * 16;
}

// In a stage of w8a8_f16, each two rows of x have four scales: both rows' times the weights' first, then both times
// their second. With kChannel they have two.
constexpr int kRowScaleBytes = 8;

// kBlock128: the two scales of weights that a tile has for each 128 columns: of gate and of up, or of its first and
// last 128 rows.
struct WeightScales {
    const float *first, *second;

    template <int PART>
    static __device__ __forceinline__ WeightScales of(const GemmArgs& args, int expert, int n_tile) {
        const float* scales = reinterpret_cast<const float*>(args.scales + expert * args.scales_stride);
        const int k_blocks = args.k / kE4m3BlockK, n_blocks = args.n / 128;
        const int first = PART == kDown ? 2 * n_tile : n_tile;
        const int second = PART == kDown ? min(2 * n_tile + 1, n_blocks - 1) : n_blocks / 2 + n_tile;
        return {scales + first * k_blocks, scales + second * k_blocks};
    }
};

// kChannel: the scales of rows g and g + 8 of each block's 16 rows of weights that a warp has, from block `n_block` on.
// They lie in the order of the packed rows.
template <int N_BLOCKS>
struct ChannelScales {
    float low[N_BLOCKS], high[N_BLOCKS];

    __device__ __forceinline__ ChannelScales(const GemmArgs& args, int expert, int n_block) {
        const float* scales = reinterpret_cast<const float*>(args.scales + expert * args.scales_stride);
        const int row = n_block * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const bool there = row + m * 64 < args.n;
            low[m] = there ? scales[row + m * 64] : 0.0f, high[m] = there ? scales[row + m * 64 + 8] : 0.0f;
        }
    }
};

// kChannel: what the sums for a permuted row are multiplied by: the scale of its x, and with weights on the input the
// router's. The row of x begins `from` times 16 bytes behind the first.
template <int PART>
__device__ __forceinline__ float row_scale(const GemmArgs& args, uint32_t from, int permuted_row) {
    float scale = *reinterpret_cast<const float*>(reinterpret_cast<const uint4*>(args.x) + from + args.k / 16);
    if (PART != kDown && args.router_weights) scale *= args.router_weights[args.permuted_to_expanded[permuted_row]];
    return scale;
}

// kChannel: which row of x a permuted row has: h is by permuted row, and x by token or, with static scales, by permuted
// row.
template <int PART>
__device__ __forceinline__ int x_row(const GemmArgs& args, int permuted_row) {
    if (PART == kDown || !args.top_k) return permuted_row;
    return args.permuted_to_expanded[permuted_row] / args.top_k;
}

// Bytes of a row of x in E4M3: its codes and behind them its scales.
__host__ __device__ constexpr int row_bytes(int columns) { return columns + (columns / 32 + 15) / 16 * 16; }

}  // namespace w8
}  // namespace polymoe
