// MXFP4 weights and E4M3 rows by wgmma, for any number of rows. Weights are the left operand, in registers.
//
// Only x's scales come between the MMAs (dequant/fp4_to_e4m3.cuh says why): the tensor cores, which accumulate E4M3
// products with 14 bits, add up 128 columns; such sums are multiplied by x's scales and accumulated in float32. Where
// weights lie is described in layouts/cuda/w4a8_fragments.py.
//
// x comes in permuted tiles, as quantize.cu and this kernel's own epilogue write them (epilogue/e4m3_tiles.cuh). y is
// by permuted row.
#pragma once
#include "../dequant/fp4_to_e4m3.cuh"
#include "../epilogue/bf16.cuh"
#include "../epilogue/e4m3_tiles.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "w4_producer.cuh"
#include "widths.cuh"

namespace polymoe {

// All of K for N_BLOCKS blocks of 64 rows of this warpgroup and the work tile's rows, one chain of MMAs of 128 columns
// after the other: while those of one warpgroup run, the others dequantize.
template <int WARPGROUPS, int N_BLOCKS, int BLOCK_M, int K_BLOCKS>
struct W4a8Mainloop {
    static constexpr bool kPingPong = BLOCK_M > 64;
    using S = W4Stage<Mxfp4ToE4m3, E4m3Tiles, WARPGROUPS * N_BLOCKS, BLOCK_M, K_BLOCKS>;
    float (&acc)[N_BLOCKS][BLOCK_M / 2];
    Pipeline& pipeline;
    PingPong& ping_pong;
    uint32_t lane_codes, lane_scales, lane_x, lut;
    uint32_t x_step, x_scale_step;  // from 128 columns of x to the next, in units of 16 bytes and in bytes
    int k;
    uint32_t words[4], offsets;
    uint32_t a[4][4];

    __device__ __forceinline__ W4a8Mainloop(float (&acc)[N_BLOCKS][BLOCK_M / 2], const GemmArgs& args,
                                            Pipeline& pipeline, PingPong& ping_pong, int rows, uint32_t lut)
        : acc(acc), pipeline(pipeline), ping_pong(ping_pong), lut(lut), k(args.k) {
        const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 % 4, block = threadIdx.x / 128 * N_BLOCKS;
        lane_codes = opaque(S::kCodes + block * S::kBlockCodes + tile * 512 + lane * 16);
        lane_scales = opaque(S::kScales + block * S::kBlockScales + (lane / 4 * 4 + tile) * 4);
        lane_x = opaque(S::kXScales + lane % 4 * 8);
        x_step = padded_rows(rows) * 8, x_scale_step = padded_rows(rows) * 4;
    }

    // Codes and scales of 64 columns. Where a block has no such tile, these are other bytes, but offsets inside the
    // table.
    __device__ __forceinline__ void load(uint32_t stage, int m, int k_block) {
        const uint4 w = ld_shared_v4(stage + lane_codes + m * S::kBlockCodes + k_block * 2048);
        words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
        offsets = ld_shared(stage + lane_scales + m * S::kBlockScales + k_block * 128) & 0x78787878u;
    }

    // Half of them to a[TO].
    template <int TO, int HALF>
    __device__ __forceinline__ void dequantize_half() {
        const uint2 low = ld_shared_v2(lut + extract_byte<HALF * 2>(offsets));  // row g
        const uint2 high = ld_shared_v2(lut + extract_byte<HALF * 2 + 1>(offsets));
        dequant_e2m1_to_e4m3(a[TO][0], a[TO][2], words[HALF * 2], low);
        dequant_e2m1_to_e4m3(a[TO][1], a[TO][3], words[HALF * 2 + 1], high);
#pragma unroll
        for (int i = 0; i < 4; ++i) materialize(a[TO][i]);
    }

    // 128 columns of a block, or the last 64, dequantized and multiplied; the sums times x's scales are accumulated.
    template <int M, bool WHOLE>
    __device__ __forceinline__ void mma_chain(float (&acc)[BLOCK_M / 2], uint32_t stage, int m, int k_tile) {
        const uint32_t x = smem_desc_units(stage) + k_tile * x_step, x_scales = stage + lane_x + k_tile * x_scale_step;
        float sum[M / 2];
        load(stage, m, k_tile * 2);
        dequantize_half<0, 0>();
        dequantize_half<1, 1>();
        if constexpr (WHOLE) {
            load(stage, m, k_tile * 2 + 1);
            dequantize_half<2, 0>();
            dequantize_half<3, 1>();
        }
        if (kPingPong) ping_pong.wait();
        wgmma_fence();
        WgmmaRS<M>::set_e4m3(sum, a[0], make_smem_desc_units(x));
#pragma unroll
        for (int step = 1; step < (WHOLE ? 4 : 2); ++step) {
            WgmmaRS<M>::add_e4m3(sum, a[step], make_smem_desc_units(x + step * 2));
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (kPingPong) ping_pong.pass();
#pragma unroll
        for (int n = 0; n < M / 8; ++n) {
            const uint2 scale = ld_shared_v2(x_scales + n * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                materialize(sum[4 * n + i]);
                acc[4 * n + i] = fmaf(sum[4 * n + i], __uint_as_float(i % 2 ? scale.y : scale.x), acc[4 * n + i]);
            }
        }
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.empty_barrier());
        pipeline.advance();
    }

    // All whole stages.
    template <int M>
    __device__ __forceinline__ void mma_stages(int stages) {
        for (int left = stages; left > 0; --left) {
            const uint32_t stage = pipeline.wait_full();
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
#pragma unroll
                for (int k_tile = 0; k_tile < K_BLOCKS / 2; ++k_tile) mma_chain<M, true>(acc[m], stage, m, k_tile);
            }
            release();
        }
    }

    // The k_tail, a stage that is not whole, for all rows that a work tile may have.
    __device__ __forceinline__ void mma_k_tail(int blocks) {
        const uint32_t stage = pipeline.wait_full();
        for (int k_tile = 0; k_tile * 2 < blocks; ++k_tile) {
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                if (k_tile * 2 + 1 < blocks) {
                    mma_chain<BLOCK_M, true>(acc[m], stage, m, k_tile);
                } else {
                    mma_chain<BLOCK_M, false>(acc[m], stage, m, k_tile);
                }
            }
        }
        release();
    }

    template <int... WIDTHS>
    __device__ __forceinline__ void run(int rows) {
        const int stages = k / (64 * K_BLOCKS), tail_blocks = k / 64 - stages * K_BLOCKS;
        clear<BLOCK_M / 2>(acc);
        if (stages) {
            with_narrowest<WIDTHS..., BLOCK_M>(rows, [&](auto width) { mma_stages<decltype(width)::value>(stages); });
        }
        if (tail_blocks) mma_k_tail(tail_blocks);
    }
};

// N_BLOCKS blocks of 64 rows of weights for each of WARPGROUPS consumer warpgroups, 256 rows together, by up to BLOCK_M
// rows of x, in MMAs for BLOCK_M rows or, where that is enough, for one of the smaller WIDTHS.
template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void w4a8_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ Turns<WARPGROUPS> turns;
    __shared__ TileQueue queue;
    static_assert(WARPGROUPS * N_BLOCKS == 4 && PART != kUp);
    static_assert(W4Stage<Mxfp4ToE4m3, E4m3Tiles, 4, BLOCK_M, K_BLOCKS>::kBytes == STAGE_BYTES);
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    const uint32_t skipped = (1024 - smem_address(memory) % 1024) % 1024;
    Pipeline pipeline = make_pipeline(args, smem_address(memory) + skipped, barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, 4, WARPGROUPS * 4, queue, turns);
    uint8_t* scratch = memory + skipped + pipeline.stages * pipeline.stage_bytes;
    float* amax = reinterpret_cast<float*>(scratch + 8 * kLutSteps);
    if (threadIdx.x < kLutSteps) reinterpret_cast<uint64_t*>(scratch)[threadIdx.x] = e2m1_lut(threadIdx.x);
    for (int i = threadIdx.x; i < 3 * BLOCK_M; i += blockDim.x) amax[i] = 0.0f;
    __syncthreads();
    const LaunchOrder order(args);
    order.begin<PART>();
    const int n_blocks = (args.n + 63) / 64, n_tiles = (n_blocks + 3) / 4;
    const int total = order.work_tiles * n_tiles;

    if (warp >= WARPGROUPS * 4) {
        reg_dealloc<producer_regs(WARPGROUPS)>();
        pipeline.parity = 1;
        if (lane == 0) {
            produce_w4<Mxfp4ToE4m3, E4m3Tiles, 4, BLOCK_M, K_BLOCKS, PART>(args, pipeline, queue, warp - WARPGROUPS * 4,
                                                                           order, n_tiles);
        }
        return;
    }
    reg_alloc<consumer_regs(WARPGROUPS)>();
    pipeline.parity = 0;
    const int warpgroup = warp / 4;
    PingPong ping_pong = turns.of(warpgroup, (warpgroup + 1) % WARPGROUPS);
    float acc[N_BLOCKS][BLOCK_M / 2];
    int buffer = 0;  // of amax
    queue.consume(pipeline, total, [&](QueuedTile queued) {
        const int n_block = queued.n_block;
        const WorkTile tile = queued.rows;
        W4a8Mainloop<WARPGROUPS, N_BLOCKS, BLOCK_M, K_BLOCKS>(acc, args, pipeline, ping_pong, tile.rows,
                                                              smem_address(scratch))
            .template run<WIDTHS...>(tile.rows);
        // The rows' largest scales come after all offsets into the table.
        const uint8_t* row_max = args.scales + tile.expert * args.scales_stride + n_blocks * (args.k / 64) * 128;
        if constexpr (PART == kGateUp) {
            store_h_e4m3<WARPGROUPS, N_BLOCKS, BLOCK_M, Mxfp4ToE4m3>(args, acc, tile, n_block, row_max, amax, buffer);
            if (++buffer == 3) buffer = 0;
        } else {
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                const int tile16 = (n_block + warp / 4 * N_BLOCKS + m) * 4 + warp % 4;
                if (tile16 >= args.n / 16) break;
                const uint8_t* low = row_max + tile16 * 16 + lane / 4;
                const WeightRows<kDown, kHalves> rows(args, tile.expert, tile16,
                                                      Mxfp4ToE4m3::row_scale(low, args.expert_scale, tile.expert),
                                                      Mxfp4ToE4m3::row_scale(low + 8, args.expert_scale, tile.expert));
                store_bf16<BLOCK_M, 1, kFastSwiglu, false>(args, tile, rows, acc[m], tile16);
            }
        }
    });
}

}  // namespace polymoe
