// What kernels of e4m3 weights, with scales for 128 x 128, share: tiles of 256 rows of weights, 128 columns a stage, for two
// warpgroups that multiply and four warps that bring data. Where weights lie is described in layouts/hopper_bytes.py.
#pragma once
#include "gemm.cuh"
#include "quantize.cuh"

namespace polymoe {
namespace fp8 {

constexpr int kWarpgroups = 2, kGroups = 2, kWarps = kWarpgroups * 4;  // groups of 64 rows of weights a warpgroup
constexpr int kGroupBytes = 64 * 128, kTileBytes = kWarpgroups * kGroups * kGroupBytes;
constexpr int kThreads = kWarpgroups * 128 + 128;

// The two scales of weights that a tile has for each 128 columns: of gate and of up, or of its first and last 128 rows.
struct WeightScales {
    const float *first, *second;

    template <int MATRIX>
    static __device__ __forceinline__ WeightScales of(const GemmArgs& args, int expert, int tile) {
        const float* scales = reinterpret_cast<const float*>(args.scales + expert * args.scales_expert);
        const int blocks = args.columns / 128, rows128 = args.rows / 128;
        const int first = MATRIX == kDown ? 2 * tile : tile;
        const int second = MATRIX == kDown ? min(2 * tile + 1, rows128 - 1) : rows128 / 2 + tile;
        return {scales + first * blocks, scales + second * blocks};
    }
};

// The sums of a group of 64 rows of weights, in expert order. Four neighbours of a row of y are in one lane's hands.
// TOGETHER times eight rows are under way at once.
template <int MOST, int TOGETHER = 1>
__device__ __forceinline__ void write_y(const GemmArgs& args, const float (&acc)[MOST / 2], int4 item, int group) {
    static_assert(MOST / 8 % TOGETHER == 0);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = group * 64 + threadIdx.x / 32 % 4 * 16;
    const long long bias = static_cast<long long>(item.x) * args.rows + row;
    const float low = load_bias(args.bias, args.bias_dtype, bias + row_of<kDown>(g, 0));
    const float high = load_bias(args.bias, args.bias_dtype, bias + row_of<kDown>(g, 1));
    uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(item.y + g) * args.rows + row + 4 * t;
    const long long step = 8LL * args.rows;
#pragma unroll
    for (int n = 0; n < MOST / 8; n += TOGETHER) {
        if (n * 8 >= item.z) break;
        uint2 y[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const float* c = &acc[4 * (n + i)];
            y[i].x = transposed(pack_bfloat16(c[0] + low, c[1] + low));
            y[i].y = transposed(pack_bfloat16(c[2] + high, c[3] + high));
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if ((n + i) * 8 + g < item.z) *reinterpret_cast<uint2*>(out + i * step) = y[i];
        }
        out += TOGETHER * step;
    }
}

}  // namespace fp8
}  // namespace polymoe
