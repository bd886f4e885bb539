// Weights of 4 or 8 bits and bfloat16 rows by wgmma, for enough rows an expert that each decoded weight is used many
// times. Weights are the left operand, in registers: while one group of wgmma runs, the next weights are dequantized.
//
// x comes in permuted tiles, as permute.cu and this kernel's own epilogue write them: for each work tile, for each 64
// columns, its rows of 128 bytes, swizzled, with room for a multiple of 8 rows. y is by permuted row.
#pragma once
#include "../dequant/scales.cuh"
#include "../epilogue/bf16.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "w4_producer.cuh"
#include "widths.cuh"

namespace polymoe {

// All of K, for this warpgroup's N_BLOCKS blocks of 64 rows of weights and the work tile's rows, in MMAs for M of them.
//
// 32 columns are dequantized while the MMAs of the 32 before run. Two sets of registers alternate; a set is written
// again only after the MMAs that read it have been waited for.
template <class F, int PART, int WARPGROUPS, int N_BLOCKS, int BLOCK_M, int K_BLOCKS>
struct W4a16Mainloop {
    using S = W4Stage<F, Bf16Tiles, WARPGROUPS * N_BLOCKS, BLOCK_M, K_BLOCKS>;
    // Whether the first columns of the next tile are dequantized before this one is stored: that pays where K is short.
    static constexpr bool kAhead = PART == kDown;
    static constexpr int kBlocks = kStepWords<F>, kSteps = 4 / kBlocks;  // blocks of 64 columns; 16 columns of a block
    float (&acc)[N_BLOCKS][BLOCK_M / 2];
    Pipeline& pipeline;
    uint32_t lane_codes, lane_scales;  // in a stage
    uint32_t x_step;                   // from 64 columns of x to the next, in units of 16 bytes
    int tile, k;
    bool gathers;  // x is by token
    uint32_t words[N_BLOCKS][4 * kBlocks];
    typename F::Scales scales[N_BLOCKS][kBlocks];
    uint32_t a[2][N_BLOCKS][2][4];

    __device__ __forceinline__ W4a16Mainloop(float (&acc)[N_BLOCKS][BLOCK_M / 2], const GemmArgs& args,
                                             Pipeline& pipeline)
        : acc(acc), pipeline(pipeline), tile(threadIdx.x / 32 % 4), k(args.k), gathers(args.top_k) {
        const int lane = threadIdx.x % 32, block = threadIdx.x / 128 * N_BLOCKS;
        lane_codes = opaque(S::kCodes + block * S::kBlockCodes + tile * 512 + lane * 16);
        lane_scales = opaque(S::kScales + block * S::kBlockScales + (lane / 4 * 4 + tile) * kTileScaleBytes<F>);
    }

    // The current stage's address, once it is full.
    __device__ __forceinline__ uint32_t wait_full() {
        const uint32_t stage = pipeline.wait_full();
        if (PART != kDown && gathers) fence_proxy_async();  // cp.async writes as ordinary stores do
        return stage;
    }

    // Of a block of the stage, to scales[m][to].
    __device__ __forceinline__ void load_block_scales(uint32_t stage, int block, int to) {
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            scales[m][to] =
                load_scales<F>(stage + lane_scales + m * S::kBlockScales + block / F::kScaleBlocks * F::kScaleBytes);
        }
    }

    // Codes and scales of 64 columns. Where a block has no such tile, these are other bytes.
    __device__ __forceinline__ void load(uint32_t stage, int inner) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const int block = inner * kBlocks + i;
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                const uint4 w = ld_shared_v4(stage + lane_codes + m * S::kBlockCodes + block * 2048);
                uint32_t* to = &words[m][4 * i];
                to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
            }
            load_block_scales(stage, block, i);
        }
    }

    template <int HALF>
    __device__ __forceinline__ void dequantize_half() {
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int step = HALF * 2 + s;
                dequantize<F>(a[HALF][m][s], &words[m][step * kBlocks],
                              F::scale(scales[m][step / kSteps], step % kSteps));
#pragma unroll
                for (int i = 0; i < 4; ++i) materialize(a[HALF][m][s][i]);
            }
        }
    }

    template <int M, int HALF>
    __device__ __forceinline__ void mma(uint32_t x) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const uint64_t b = make_smem_desc_units(x + HALF * 4 + s * 2);
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) WgmmaRS<M>::add_bf16(acc[m], a[HALF][m][s], b);
        }
        wgmma_commit();
    }

    // The k_tail, a stage that is not whole: 16 columns at a time, for all rows that a work tile may have.
    __device__ __forceinline__ void mma_k_tail(uint32_t stage, int steps) {
        for (int i = 0; i < steps; ++i) {
            const int block = i / kSteps, block_steps = min(kSteps, steps - block * kSteps), step = i % kSteps;
            // In a whole block a lane's words are together; in the last, of fewer columns, they are apart.
            const uint32_t word =
                block * 2048 + (block_steps == kSteps ? step * 4 * kBlocks
                                                      : (tile * block_steps + step) * 128 * kBlocks - tile * 512 -
                                                            threadIdx.x % 32 * (16 - 4 * kBlocks));
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
#pragma unroll
                for (int w = 0; w < kBlocks; ++w) {
                    words[m][w] = ld_shared(stage + lane_codes + m * S::kBlockCodes + word + w * 4);
                }
            }
            load_block_scales(stage, block, 0);
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                const typename F::Scale low = step == 0 ? F::scale(scales[m][0], 0) : F::scale(scales[m][0], 1);
                const typename F::Scale high = step == 2 ? F::scale(scales[m][0], 2) : F::scale(scales[m][0], 3);
                dequantize<F>(a[0][m][0], words[m], step < 2 ? low : high);
            }
            wgmma_fence();
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                WgmmaRS<BLOCK_M>::add_bf16(acc[m], a[0][m][0],
                                           make_smem_desc_units(smem_desc_units(stage) + i / 4 * x_step + i % 4 * 2));
            }
            wgmma_commit();
            wgmma_wait<0>();
        }
    }

    // All whole stages.
    template <int M>
    __device__ __forceinline__ void mma_stages(int stages) {
        const bool leader = threadIdx.x % 32 == 0;
        uint32_t released = 0, stage = pipeline.address(), x = smem_desc_units(stage);
        // Unrolled, every block takes registers of its own.
        constexpr int kUnroll = N_BLOCKS == 1 ? K_BLOCKS : 1;
        for (int left = stages; left > 0; --left) {
#pragma unroll kUnroll
            for (int inner = 0; inner < K_BLOCKS; ++inner) {
                mma<M, 0>(x);
                wgmma_wait<1>();  // the block before is done
                if (inner == 0 && released && leader) mbarrier_arrive(released);
                dequantize_half<1>();
                mma<M, 1>(x);
                if (inner + 1 < K_BLOCKS) {
                    x += x_step;
                    load(stage, inner + 1);
                } else {
                    released = pipeline.empty + 8 * pipeline.stage;
                    pipeline.advance();
                    if (kAhead || left > 1) {
                        stage = wait_full();
                        x = smem_desc_units(stage);
                        load(stage, 0);
                    }
                }
                wgmma_wait<1>();
                dequantize_half<0>();
            }
        }
        wgmma_wait<0>();
        if (leader) mbarrier_arrive(released);
    }

    // Ahead of a tile's whole stages. Where the queue is empty, the stage is full of other bytes.
    __device__ __forceinline__ void begin() {
        load(wait_full(), 0);
        dequantize_half<0>();
    }

    template <int... WIDTHS>
    __device__ __forceinline__ void run(int rows) {
        x_step = padded_rows(rows) * 8;
        const int stages = k / (64 * K_BLOCKS), tail_steps = (k - stages * (64 * K_BLOCKS)) / 16;
        clear<BLOCK_M / 2>(acc);
        if (stages) {
            if (!kAhead) begin();
            with_narrowest<WIDTHS..., BLOCK_M>(rows, [&](auto width) { mma_stages<decltype(width)::value>(stages); });
        }
        if (tail_steps) {
            mma_k_tail(wait_full(), tail_steps);
            if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.empty_barrier());
            pipeline.advance();
            if (kAhead) begin();
        }
    }
};

// Writes h or y for the tile number `tile16` by all rows of the work tile.
template <int PART, int BLOCK_M>
__device__ __forceinline__ void store_w4a16_tile(const GemmArgs& args, WorkTile tile,
                                                 const WeightRows<PART, kHalves>& rows, const float* acc, int tile16) {
    constexpr int kTogether = BLOCK_M == 32 ? 1 : 4;  // for up to 32 rows it makes no difference
    if constexpr (PART == kDown) {
        store_bf16<BLOCK_M, kTogether, kFastSwiglu, false>(args, tile, rows, acc, tile16);
    } else {
        if constexpr (PART == kGateUp && kTogether > 1) {
            if (args.activation == kSwiglu && !args.router_weights) {
                store_bf16<BLOCK_M, kTogether, kFastSwiglu, false>(args, tile, rows, acc, tile16);
                return;
            }
        }
        for_activation<PART>(args, [&](auto evaluates) {
            store_bf16<BLOCK_M, 1, decltype(evaluates)::how, true>(args, tile, rows, acc, tile16);
        });
    }
}

// N_BLOCKS blocks of 64 rows of weights for each of WARPGROUPS consumer warpgroups by up to BLOCK_M rows of x, in MMAs
// for BLOCK_M rows or, where that is enough, for one of the smaller WIDTHS.
template <class F, int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void w4a16_wgmma_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ TileQueue queue;
    constexpr int kBlocks = WARPGROUPS * N_BLOCKS;
    static_assert(W4Stage<F, Bf16Tiles, kBlocks, BLOCK_M, K_BLOCKS>::kBytes == STAGE_BYTES);
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    const bool gathers = PART != kDown && args.top_k;  // x is by token
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, full_arrivals(gathers), WARPGROUPS * 4, queue);
    __syncthreads();
    if (gathers && !args.second_launch) grid_dependency_wait();  // the kernel ahead writes the lists of tiles
    const LaunchOrder order(args);
    order.begin<PART>();
    const int tiles16 = args.n / 16, n_blocks = (tiles16 + 3) / 4, n_tiles = (n_blocks + kBlocks - 1) / kBlocks;
    const int total = order.work_tiles * n_tiles;

    if (warp >= WARPGROUPS * 4) {
        reg_dealloc<producer_regs(WARPGROUPS)>();
        pipeline.parity = 1;
        const int producer = warp - WARPGROUPS * 4;
        if (PART != kDown && gathers) {
            produce_w4<F, Bf16Tiles, kBlocks, BLOCK_M, K_BLOCKS, PART, true>(args, pipeline, queue, producer, order,
                                                                             n_tiles);
        } else if (lane == 0) {
            produce_w4<F, Bf16Tiles, kBlocks, BLOCK_M, K_BLOCKS, PART>(args, pipeline, queue, producer, order, n_tiles);
        }
    } else {
        reg_alloc<consumer_regs(WARPGROUPS)>();
        pipeline.parity = 0;
        float acc[N_BLOCKS][BLOCK_M / 2];
        W4a16Mainloop<F, PART, WARPGROUPS, N_BLOCKS, BLOCK_M, K_BLOCKS> mainloop(acc, args, pipeline);
        if (mainloop.kAhead) mainloop.begin();
        queue.consume(pipeline, total, [&](QueuedTile queued) {
            const int n_block = queued.n_block;
            const WorkTile tile = queued.rows;
            mainloop.template run<WIDTHS...>(tile.rows);
            const ExpertScales<F, PART> scales(args, tile.expert);
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                const int tile16 = (n_block + warp / 4 * N_BLOCKS + m) * 4 + warp % 4;
                if (tile16 >= tiles16) break;
                const WeightRows<PART, kHalves> rows(args, tile.expert, tile16, scales.low, scales.high);
                store_w4a16_tile<PART, BLOCK_M>(args, tile, rows, acc[m], tile16);
            }
        });
    }
}

}  // namespace polymoe
