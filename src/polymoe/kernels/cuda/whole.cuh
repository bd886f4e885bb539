// Weights that the matrix units read as they are, for few rows and for many: both operands come from shared memory, and
// nothing is decoded. One block a multiprocessor walks over (item, rows of weights) tiles; warps of their own keep a ring
// of weights and x in shared memory filled, across tiles and items, and warpgroups multiply what is there.
//
// x comes in tiles, as `spread` in rows.cu and this kernel's own epilogue write them. An item is one expert with up to
// MOST of the rows that chose it. Where weights lie is described in layouts/hopper_tiles.py. Products are in
// whole_bf16.cuh.
#pragma once
#include "gemm.cuh"
#include "tiles.cuh"
#include "wgmma_shared.cuh"

namespace polymoe {

// Registers of a thread that multiplies, and of one that brings data. What the block was started with is all there is,
// and asking for more would wait for ever.
__host__ __device__ constexpr int registers(int warpgroups) {
    return warpgroups == 2 ? 232 : warpgroups == 3 ? 152 : 112;
}

__host__ __device__ constexpr int few_registers(int warpgroups) { return warpgroups == 2 ? 40 : warpgroups == 3 ? 56 : 32; }

constexpr int kBlock = 8192;  // bytes of 64 rows of 128 bytes

// A stage: BLOCKS times 128 bytes of each row of the groups of 64 rows, then x for them.
template <int GROUPS, int MOST, int BLOCKS>
struct Stage {
    static constexpr int kGroup = BLOCKS * kBlock, kX = GROUPS * kGroup;
    static constexpr int kBytes = (kX + BLOCKS * MOST * 128 + 1023) / 1024 * 1024;
};

// 16 rows of weights by 8 rows of x, brought to an end. c: rows 2t and 2t + 1 of x for the products' row g, then for
// g + 8; afterwards a lane has row g of x and the products' rows 2t, 2t + 1 and those behind 8.
template <int MATRIX>
__device__ __forceinline__ void finish(
    const GemmArgs& args, const float* c, int4 item, int row16, int n0, float low_bias, float high_bias) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n = n0 + g;
    float low[2] = {c[0], c[1]}, high[2] = {c[2], c[3]};
    if (MATRIX != kDown && args.weights) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float weight = args.weights[args.order[item.y + min(n0 + 2 * t + i, item.z - 1)]];
            low[i] *= weight, high[i] *= weight;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) low[i] += low_bias, high[i] += high_bias;
    if (MATRIX == kGated) {
        const uint32_t v = transposed(pack_bfloat16(gated(args, low[0], high[0]), gated(args, low[1], high[1])));
        uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(item.w) * ((args.rows / 2 + 63) / 64 * 64);
        if (n < item.z) *reinterpret_cast<uint32_t*>(out + tile_place(n, row16 / 2 + 2 * t, item.z)) = v;
        return;
    }
    if (MATRIX == kPlain) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = fmaxf(low[i], 0.0f), high[i] = fmaxf(high[i], 0.0f);
            low[i] *= low[i], high[i] *= high[i];
        }
    }
    uint2 v;
    v.x = transposed(pack_bfloat16(low[0], low[1]));
    v.y = transposed(pack_bfloat16(high[0], high[1]));
    if (n >= item.z) return;
    uint16_t* out = static_cast<uint16_t*>(args.out);
    if (MATRIX == kDown) {
        out += static_cast<long long>(item.y + n) * args.rows + row16 + 4 * t;
    } else {
        out += static_cast<long long>(item.w) * ((args.rows + 63) / 64 * 64) + tile_place(n, row16 + 4 * t, item.z);
    }
    *reinterpret_cast<uint2*>(out) = v;
}

// The sums of 16 rows of weights, the tile `tile16` of them, by all rows of the item.
template <int MATRIX, int MOST>
__device__ __forceinline__ void finish_rows(const GemmArgs& args, const float* acc, int4 item, int tile16) {
    const int g = threadIdx.x % 32 / 4, row = tile16 * (MATRIX == kGated ? 8 : 16);
    const long long bias = static_cast<long long>(item.x) * (MATRIX == kGated ? args.rows / 2 : args.rows) + row;
    const void* second = MATRIX == kGated ? args.up_bias : args.bias;
    const float low_bias = load_bias(args.bias, args.bias_dtype, bias + row_of<MATRIX>(g, 0));
    const float high_bias = load_bias(second, args.bias_dtype, bias + row_of<MATRIX>(g, 1));
#pragma unroll
    for (int n = 0; n < MOST / 8; ++n) {
        if (n * 8 >= item.z) break;
        finish<MATRIX>(args, &acc[n * 4], item, tile16 * 16, n * 8, low_bias, high_bias);
    }
}

// Few rows are one item: what it has read need not stay in the L2 cache.
template <int MOST>
__device__ __forceinline__ void copy_weights(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    if (MOST <= 32) {
        copy_bulk_once(shared, global, bytes, barrier);
    } else {
        copy_bulk(shared, global, bytes, barrier);
    }
}

// Moves weights and x to shared memory: one thread of each of some warps, since one cannot issue copies fast enough. The
// last one brings x.
template <int GROUPS>
constexpr int kBringers = GROUPS < 4 ? GROUPS + 1 : 4;

template <int GROUPS, int MOST, int BLOCKS, int MATRIX>
__device__ __forceinline__ void bring(const GemmArgs& args, Ring& ring, int bringer, int total, int tiles) {
    using Shape = Stage<GROUPS, MOST, BLOCKS>;
    constexpr int kOthers = kBringers<GROUPS>, kMine = (GROUPS + kOthers - 1) / kOthers;
    const bool brings_x = bringer == kOthers - 1;
    const int tiles16 = args.rows / 16, bytes_of_row = args.columns * 2, units = (bytes_of_row + 127) / 128;
    bool waited = MATRIX != kDown;
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const int index = at / tiles, group = (at - index * tiles) * GROUPS;
        const int4 item = args.items[index];
        const int x_bytes = padded_rows(item.z) * 128;
        const uint8_t* codes[kMine];
        int rows[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int inner = i * kOthers + bringer, g = group + inner;
            rows[i] = inner < GROUPS ? max(0, min(4, tiles16 - 4 * g)) * 16 : 0;
            codes[i] = args.codes + item.x * args.codes_expert + 64LL * g * bytes_of_row;
        }
        const uint8_t* x = reinterpret_cast<const uint8_t*>(args.x) + static_cast<long long>(item.w) * units * 128;
        for (int block = 0; block < units; block += BLOCKS) {
            const uint32_t barrier = ring.full + 8 * ring.slot, to = ring.data + ring.slot * ring.stage_bytes;
            const int here = min(BLOCKS, units - block), row_bytes = min(here * 128, bytes_of_row - block * 128);
            uint32_t bytes = brings_x ? here * x_bytes : 0;
#pragma unroll
            for (int i = 0; i < kMine; ++i) bytes += rows[i] * row_bytes;
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity);
            barrier_arrive_expect(barrier, bytes);
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                if (rows[i]) {
                    copy_weights<MOST>(to + (i * kOthers + bringer) * Shape::kGroup, codes[i], rows[i] * row_bytes, barrier);
                    codes[i] += rows[i] * row_bytes;
                }
            }
            if (brings_x) {
                if (!waited) {
                    wait_for_previous_kernel();
                    let_next_kernel_start();
                    waited = true;
                }
                copy_bulk(to + Shape::kX, x, here * x_bytes, barrier);
                x += here * x_bytes;
            }
            ring.next();
        }
    }
    // Whoever waits for this kernel relies on the one before having finished too.
    if (!waited) wait_for_previous_kernel();
}

}  // namespace polymoe
