// bfloat16 weights and rows by wgmma with both operands in shared memory, for few rows and for many: nothing is
// decoded.
//
// One persistent CTA per SM walks over the tiles (a work tile by N_BLOCKS times 64 rows of weights for each consumer
// warpgroup). Producer warps keep a pipeline of weights and x full, across tiles and work tiles.
//
// x is by token: producers gather its rows. h comes in permuted tiles, as this kernel's own epilogue writes them. Where
// weights lie is described in layouts/cuda/w16_swizzle128.py. y is by permuted row.
#pragma once
#include "../epilogue/bf16.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "gathered_rows.cuh"
#include "schedule.cuh"
#include "widths.cuh"

namespace polymoe {
namespace bf16 {

constexpr int kBlockBytes = 8192;  // of 64 rows of 128 bytes

// K_BLOCKS times 128 bytes of each row of the N_BLOCKS blocks of 64 rows, then x for them.
template <int N_BLOCKS, int BLOCK_M, int K_BLOCKS>
using Stage = polymoe::Stage<N_BLOCKS * K_BLOCKS * kBlockBytes, K_BLOCKS * BLOCK_M * 128>;

template <int K_BLOCKS>
constexpr int kStageBlockBytes = K_BLOCKS * kBlockBytes;

// The tile number `tile16` of 16 rows of weights by all rows of the work tile. Router weights that multiply the input
// round before biases are added.
template <int PART, int BLOCK_M>
__device__ __forceinline__ void store(const GemmArgs& args, float* acc, WorkTile tile, int tile16) {
    const WeightRows<PART, kNeighbours> rows(args, tile.expert, tile16);
    if (PART != kDown && args.router_weights) {
#pragma unroll
        for (int m = 0; m < BLOCK_M; m += 8) {
            if (m >= tile.rows) break;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float weight = input_weight(args, tile, m + threadIdx.x % 4 * 2 + i);
                acc[m / 2 + i] *= weight, acc[m / 2 + 2 + i] *= weight;
            }
        }
    }
    for_activation<PART>(args, [&](auto evaluates) {
        store_bf16<BLOCK_M, 4, decltype(evaluates)::how, false>(args, tile, rows, acc, tile16);
    });
}

// Gate and up read rows of x by token.
template <int PART>
constexpr bool kGathers = PART != kDown;

// Registers of consumers and of producers, which keep the places of their rows.
template <int PART>
constexpr int kConsumerRegs = kGathers<PART> ? 216 : 224;
template <int PART>
constexpr int kProducerRegs = kGathers<PART> ? 72 : 56;

// By one lane of each producer warp, since a single thread cannot issue copies fast enough; where x is gathered by all.
template <int N_BLOCKS, int BLOCK_M, int K_BLOCKS, int PART>
__device__ __forceinline__ void produce(const GemmArgs& args, Pipeline& pipeline, TileQueue& queue, int producer,
                                        int total, int n_tiles) {
    using S = Stage<N_BLOCKS, BLOCK_M, K_BLOCKS>;
    constexpr int kMine = (N_BLOCKS + kProducerWarps - 1) / kProducerWarps;
    const bool leader = threadIdx.x % 32 == 0, copies_x = !kGathers<PART> && producer == kProducerWarps - 1;
    const int tiles16 = args.n / 16, row_bytes = args.k * 2, k_blocks = (row_bytes + 127) / 128;
    GatheredRows<BLOCK_M> gathered;
    WaitForX wait_for_x{PART != kDown};
    const bool takes = producer == 0 && leader;
    TileTaker<N_BLOCKS> taker(args, total, n_tiles, blockIdx.x);
    const auto next_tile = [&] {
        if (takes) take_tile(taker, queue, pipeline);
        if (kGathers<PART>) __syncwarp();
        return queue.wait(pipeline);
    };
    for_each_tile(total, next_tile, [&](QueuedTile queued) {
        const int n_block = queued.n_block;
        const WorkTile tile = queued.rows;
        const int x_bytes = padded_rows(tile.rows) * 128;
        const uint8_t* codes[kMine];
        int rows[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int inner = i * kProducerWarps + producer, block = n_block + inner;
            rows[i] = inner < N_BLOCKS ? max(0, min(4, tiles16 - 4 * block)) * 16 : 0;
            codes[i] = args.codes + tile.expert * args.codes_stride + 64LL * block * row_bytes;
        }
        const uint8_t* x =
            reinterpret_cast<const uint8_t*>(args.x) + static_cast<long long>(tile.padded_row) * k_blocks * 128;
        if (kGathers<PART>) gathered.begin(args, tile, producer);
        for (int k_block = 0; k_block < k_blocks; k_block += K_BLOCKS) {
            const uint32_t barrier = pipeline.full_barrier(), to = pipeline.address();
            const int blocks = min(K_BLOCKS, k_blocks - k_block),
                      part_bytes = min(blocks * 128, row_bytes - k_block * 128);
            pipeline.wait_empty();
            if (takes && k_block) queue.announce(pipeline);
            if (leader) {
                uint32_t bytes = copies_x ? blocks * x_bytes : 0;
#pragma unroll
                for (int i = 0; i < kMine; ++i) bytes += rows[i] * part_bytes;
                mbarrier_arrive_expect_tx(barrier, bytes);
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    if (rows[i]) {
                        copy_weights<BLOCK_M>(to + (i * kProducerWarps + producer) * kStageBlockBytes<K_BLOCKS>,
                                              codes[i], rows[i] * part_bytes, barrier);
                        codes[i] += rows[i] * part_bytes;
                    }
                }
            }
            if (kGathers<PART>) {
#pragma unroll
                for (int i = 0; i < K_BLOCKS; ++i) {
                    if (i < blocks) gathered.copy(args, to + S::kX + i * x_bytes, k_block + i, producer);
                }
                cp_async_mbarrier_arrive(barrier);
            }
            if (copies_x) {
                wait_for_x();
                bulk_copy_g2s(to + S::kX, x, blocks * x_bytes, barrier);
                x += blocks * x_bytes;
            }
            pipeline.advance();
        }
        if (takes) taker.look_up();
    });
    if (leader) mbarrier_arrive(pipeline.full_barrier());
    if (kGathers<PART>) mbarrier_arrive(pipeline.full_barrier());
    wait_for_x.end();
    if (kGathers<PART>) {  // until copies have landed
        for (int i = 1; i < pipeline.stages; ++i) {
            pipeline.advance();
            pipeline.wait_empty();
        }
    }
}

// All of K for N_BLOCKS blocks of 64 rows of this warpgroup, and M of the work tile's rows. `width`: tiles of 16 rows
// in each block.
template <int PART, int WARPGROUPS, int N_BLOCKS, int M, int BLOCK_M, int K_BLOCKS>
__device__ __forceinline__ void mainloop(float (&acc)[N_BLOCKS][BLOCK_M / 2], Pipeline& pipeline, int k,
                                         const int (&width)[N_BLOCKS], int warpgroup, uint32_t x_step) {
    using S = Stage<WARPGROUPS * N_BLOCKS, BLOCK_M, K_BLOCKS>;
    constexpr int kStageBlock = kStageBlockBytes<K_BLOCKS>;
    const bool leader = threadIdx.x % 32 == 0;
    const int stages = k / (64 * K_BLOCKS), k_tail = k - stages * (64 * K_BLOCKS);
    clear<M / 2>(acc);
    uint32_t released = 0;
    for (int s = 0; s < stages; ++s) {
        const uint32_t stage = pipeline.wait_full(), weights = stage + warpgroup * N_BLOCKS * kStageBlock;
        if (kGathers<PART>) fence_proxy_async();  // cp.async writes as ordinary stores do
        wgmma_fence();
#pragma unroll
        for (int inner = 0; inner < K_BLOCKS; ++inner) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint32_t x = stage + S::kX + inner * x_step + step * 32;
#pragma unroll
                for (int m = 0; m < N_BLOCKS; ++m) {
                    const uint32_t block = weights + m * kStageBlock + inner * (width[m] * 2048);
                    WgmmaSS<M>::add_bf16(acc[m], make_smem_desc(block + step * 32), make_smem_desc(x));
                }
            }
        }
        wgmma_commit();
        wgmma_wait<1>();  // the stage before is done
        if (released && leader) mbarrier_arrive(released);
        released = pipeline.empty_barrier();
        pipeline.advance();
    }
    wgmma_wait<0>();
    if (released && leader) mbarrier_arrive(released);
    if (k_tail) {
        const uint32_t stage = pipeline.wait_full(), weights = stage + warpgroup * N_BLOCKS * kStageBlock;
        if (kGathers<PART>) fence_proxy_async();
        const int whole = k_tail / 64 * 4;  // steps in whole blocks; the rest of a row is not swizzled
        wgmma_fence();
        for (int step = 0; step < k_tail / 16; ++step) {
            const uint32_t x = stage + S::kX + step / 4 * x_step + step % 4 * 32;
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                const uint32_t block = weights + m * kStageBlock, bytes = width[m] * 512;  // of a step
                const uint64_t a = step < whole ? make_smem_desc(block + step / 4 * (4 * bytes) + step % 4 * 32)
                                                : make_smem_desc_no_swizzle(block + step * bytes, bytes / 2, 128);
                WgmmaSS<M>::add_bf16(acc[m], a, make_smem_desc(x));
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (leader) mbarrier_arrive(pipeline.empty_barrier());
        pipeline.advance();
    }
}

template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void consume(const GemmArgs& args, Pipeline& pipeline, TileQueue& queue, int total) {
    const int warp = warp_uniform(threadIdx.x / 32), tiles16 = args.n / 16;
    float acc[N_BLOCKS][BLOCK_M / 2];
    queue.consume(pipeline, total, [&](QueuedTile queued) {
        const WorkTile tile = queued.rows;
        const int first = queued.n_block + warp / 4 * N_BLOCKS;
        int width[N_BLOCKS];
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) width[m] = max(1, min(4, tiles16 - 4 * (first + m)));
        with_narrowest<WIDTHS..., BLOCK_M>(tile.rows, [&](auto rows) {
            mainloop<PART, WARPGROUPS, N_BLOCKS, decltype(rows)::value, BLOCK_M, K_BLOCKS>(
                acc, pipeline, args.k, width, warp / 4, padded_rows(tile.rows) * 128);
        });
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const int tile16 = (first + m) * 4 + warp % 4;
            if (tile16 >= tiles16) break;
            store<PART, BLOCK_M>(args, acc[m], tile, tile16);
        }
    });
}

}  // namespace bf16

// N_BLOCKS blocks of 64 rows of weights for each of WARPGROUPS consumer warpgroups by up to BLOCK_M rows of x, in MMAs
// for BLOCK_M rows or, where that is enough, for one of the smaller WIDTHS.
template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void bf16_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ TileQueue queue;
    constexpr int kBlocks = WARPGROUPS * N_BLOCKS;
    static_assert(WARPGROUPS == 2, "registers are shared out for two");
    static_assert(bf16::Stage<kBlocks, BLOCK_M, K_BLOCKS>::kBytes == STAGE_BYTES);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, full_arrivals(bf16::kGathers<PART>), WARPGROUPS * 4, queue);
    __syncthreads();
    begin_launch<PART>();
    const int n_blocks = (args.n + 63) / 64, n_tiles = (n_blocks + kBlocks - 1) / kBlocks;
    const int total = args.tiles->work_tiles * n_tiles;

    if (warp >= WARPGROUPS * 4) {
        reg_dealloc<bf16::kProducerRegs<PART>>();
        pipeline.parity = 1;
        const int producer = warp - WARPGROUPS * 4;
        if (bf16::kGathers<PART> || lane == 0) {
            bf16::produce<kBlocks, BLOCK_M, K_BLOCKS, PART>(args, pipeline, queue, producer, total, n_tiles);
        }
    } else {
        reg_alloc<bf16::kConsumerRegs<PART>>();
        pipeline.parity = 0;
        bf16::consume<PART, WARPGROUPS, N_BLOCKS, K_BLOCKS, BLOCK_M, WIDTHS...>(args, pipeline, queue, total);
    }
}

}  // namespace polymoe
