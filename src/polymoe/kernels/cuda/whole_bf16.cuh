// Products of bfloat16 weights and bfloat16 rows: see whole.cuh.
#pragma once
#include "whole.cuh"

namespace polymoe {

// All of K for MT groups of 64 rows of this warpgroup, and N of the item's rows. `width`: tiles of 16 rows in each group.
template <int WG, int MT, int N, int MOST, int BLOCKS>
__device__ __forceinline__ void multiply(
    float (&acc)[MT][MOST / 2], Ring& ring, int columns, const int (&width)[MT], int warpgroup, uint32_t x_step) {
    using Shape = Stage<WG * MT, MOST, BLOCKS>;
    const bool leader = threadIdx.x % 32 == 0;
    const int stages = columns / (64 * BLOCKS), rest = columns - stages * (64 * BLOCKS);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[m][i] = 0.0f;
    }
    uint32_t given = 0;
    for (int s = 0; s < stages; ++s) {
        const uint32_t stage = ring.wait(), weights = stage + warpgroup * MT * Shape::kGroup;
        products_fence();
#pragma unroll
        for (int inner = 0; inner < BLOCKS; ++inner) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint64_t x = describe(stage + Shape::kX + inner * x_step + step * 32);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    const uint32_t block = weights + m * Shape::kGroup + inner * (width[m] * 2048);
                    SharedProduct<N>::add(acc[m], describe(block + step * 32), x);
                }
            }
        }
        products_commit();
        products_wait<1>();  // the stage before is done
        if (given && leader) barrier_arrive(given);
        given = ring.empty + 8 * ring.slot;
        ring.next();
    }
    products_wait<0>();
    if (given && leader) barrier_arrive(given);
    if (rest) {
        const uint32_t stage = ring.wait(), weights = stage + warpgroup * MT * Shape::kGroup;
        const int whole = rest / 64 * 4;  // steps; what is left of a row has no blocks
        products_fence();
        for (int step = 0; step < rest / 16; ++step) {
            const uint64_t x = describe(stage + Shape::kX + step / 4 * x_step + step % 4 * 32);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const uint32_t group = weights + m * Shape::kGroup, bytes = width[m] * 512;  // of a step
                const uint64_t a = step < whole ? describe(group + step / 4 * (4 * bytes) + step % 4 * 32)
                                                : describe_pieces(group + step * bytes, bytes / 2, 128);
                SharedProduct<N>::add(acc[m], a, x);
            }
        }
        products_commit();
        products_wait<0>();
        if (leader) barrier_arrive(ring.empty + 8 * ring.slot);
        ring.next();
    }
}

// In products of N or, where the item has more rows, N + STEP, up to MOST.
template <int WG, int MT, int N, int MOST, int STEP, int BLOCKS>
__device__ __forceinline__ void multiply_rows(
    float (&acc)[MT][MOST / 2], Ring& ring, int rows, int columns, const int (&width)[MT], int warpgroup) {
    if constexpr (N < MOST) {
        if (rows > N) {
            return multiply_rows<WG, MT, N + STEP, MOST, STEP, BLOCKS>(acc, ring, rows, columns, width, warpgroup);
        }
    }
    multiply<WG, MT, N, MOST, BLOCKS>(acc, ring, columns, width, warpgroup, padded_rows(rows) * 128);
}

// What warps that multiply do with `total` tiles.
template <int WG, int MT, int MOST, int STEP, int BLOCKS, int MATRIX>
__device__ __forceinline__ void work(const GemmArgs& args, Ring& ring, int total, int tiles) {
    const int warp = threadIdx.x / 32, tiles16 = args.rows / 16;
    float acc[MT][MOST / 2];
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const int index = at / tiles, first = ((at - index * tiles) * WG + warp / 4) * MT;
        const int4 item = args.items[index];
        int width[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) width[m] = max(1, min(4, tiles16 - 4 * (first + m)));
        // The narrowest product that holds the item's rows.
        multiply_rows<WG, MT, STEP, MOST, STEP, BLOCKS>(acc, ring, item.z, args.columns, width, warp / 4);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const int tile16 = (first + m) * 4 + warp % 4;
            if (tile16 >= tiles16) break;
            finish_rows<MATRIX, MOST>(args, acc[m], item, tile16);
        }
    }
}

// MT groups of 64 rows for each of WG warpgroups by up to MOST rows of x, in products of multiples of STEP.
template <int WG, int MT, int MOST, int STEP, int BLOCKS, int MATRIX>
__device__ __forceinline__ void whole_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMostStages];
    constexpr int kGroups = WG * MT;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Ring ring = ring_at(args, memory, barriers, Stage<kGroups, MOST, BLOCKS>::kBytes);
    if (threadIdx.x == 0) {
        init_barriers(args, ring, kBringers<kGroups>, WG * 4);
        barrier_init_visible();
    }
    __syncthreads();
    // Items were complete before the kernel in front of `down` let it start; x was not.
    if (MATRIX != kDown) {
        wait_for_previous_kernel();
        let_next_kernel_start();
    }
    const int groups = (args.rows + 63) / 64, tiles = (groups + kGroups - 1) / kGroups;
    const int total = *args.count * tiles;

    if (warp >= WG * 4) {
        fewer_registers<few_registers(WG)>();
        ring.parity = 1;
        const int bringer = warp - WG * 4;
        if (lane == 0 && bringer < kBringers<kGroups>) {
            bring<kGroups, MOST, BLOCKS, MATRIX>(args, ring, bringer, total, tiles);
        }
    } else {
        more_registers<registers(WG)>();
        ring.parity = 0;
        work<WG, MT, MOST, STEP, BLOCKS, MATRIX>(args, ring, total, tiles);
    }
}

}  // namespace polymoe

#define POLYMOE_WHOLE(NAME, WG, MT, MOST, STEP, BLOCKS, MATRIX)                         \
    extern "C" __global__ void __launch_bounds__(WG * 128 + 128, 1)                     \
        NAME(const __grid_constant__ polymoe::GemmArgs args) {                          \
        polymoe::whole_gemm<WG, MT, MOST, STEP, BLOCKS, polymoe::MATRIX>(args);         \
    }

// By the most rows of x of an item. The same numbers stand in launch.py.
#define POLYMOE_WHOLE_BF16(KIND, MATRIX)                        \
    POLYMOE_WHOLE(whole_##KIND##_32, 2, 1, 32, 8, 2, MATRIX)    \
    POLYMOE_WHOLE(whole_##KIND##_64, 2, 1, 64, 16, 2, MATRIX)   \
    POLYMOE_WHOLE(whole_##KIND##_128, 2, 2, 128, 32, 1, MATRIX) \
    POLYMOE_WHOLE(whole_##KIND##_256, 2, 1, 256, 32, 1, MATRIX)
