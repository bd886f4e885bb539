// E4M3 weights with float32 scales for 128 x 128: tiles of 256 rows of weights, 128 columns a stage, for two consumer
// warpgroups and four producer warps. Where weights lie is described in layouts/cuda/w8_fragments.py.
#pragma once
#include "../gemm/args.cuh"
#include "../sizes.cuh"

namespace polymoe {
namespace w8 {

constexpr int kWarpgroups = 2, kNBlocks = 2, kWarps = kWarpgroups * 4;  // blocks of 64 rows of weights a warpgroup
constexpr int kBlockBytes = 64 * kE4m3BlockK, kTileBytes = kWarpgroups * kNBlocks * kBlockBytes;

// In a stage, each two rows of x have four scales: both rows' times the weights' first, then both times their second.
constexpr int kRowScaleBytes = 8;

// The two scales of weights that a tile has for each 128 columns: of gate and of up, or of its first and last 128 rows.
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

// Bytes of a row of x in E4M3: its codes and behind them its scales.
__host__ __device__ constexpr int row_bytes(int columns) { return columns + (columns / 32 + 15) / 16 * 16; }

}  // namespace w8
}  // namespace polymoe
