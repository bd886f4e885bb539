// E4M3 weights and E4M3 rows, multiplied as they are, for many rows.
//
// The tensor cores accumulate E4M3 products with 14 bits, so sums of 128 columns are accumulated in float32, with
// scales for 128 x 128 weights and for 128 columns of rows (kBlock128) times both; sums of all columns are multiplied
// by one scale for a row of weights and one for a row of x (kChannel). h is then slightly off before it is rounded,
// which shows for single tokens. With few rows, w8a8_f16.cuh is as fast and has exact sums.
//
// One persistent CTA per SM walks over the tiles (a work tile by 256 rows of weights). Four producer warps keep a
// pipeline of weights, x and scales full; two consumer warpgroups alternate at the tensor cores. Weights are the MMA's
// left operand, in registers. For more rows, w8a8_shared.cuh has both operands in shared memory.
//
// Rows of x are gathered, unless they come in permuted tiles (TILES), as h does; epilogue/e4m3_tiles.cuh describes
// them. With kChannel, a row's one scale is where that of its first 128 columns is. y is by permuted row.
#pragma once
#include "../epilogue/bf16.cuh"
#include "../epilogue/e4m3_tiles.cuh"
#include "../epilogue/f32_rows.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "w8a8_producer.cuh"
#include "widths.cuh"

namespace polymoe {

namespace w8a8 {

using namespace w8;

// For store_h_e4m3: accumulators are complete, and columns of h are in their own order.
struct WholeSums {
    static constexpr int kSecondHalf = 8, kPair = 2;
    static __device__ __forceinline__ float row_scale(const uint8_t*, const float*, int) { return 1.0f; }
};

// 128 columns of the tile's weights, of x, and the scales.
template <int BLOCK_M>
using Stage = polymoe::Stage<kTileBytes, BLOCK_M * 128, BLOCK_M * 4 + 16>;

// All of K for the blocks of this warpgroup and the work tile's rows, one chain of MMAs of 128 columns after the other.
template <Scales SCALES, int BLOCK_M, int PART, bool TILES>
struct Mainloop {
    using S = Stage<BLOCK_M>;
    // Where nothing comes from other threads, warpgroups are as fast or faster without taking turns.
    static constexpr bool kPingPong = !TILES;
    // MMA, since its sums and the accumulators have to be in registers: ptxas keeps those for 160 rows where it has
    // them for all, behind the sums of the widest.
    static constexpr int kWidest = SCALES == kChannel && PART == kDown ? 80 : 96;
    const GemmArgs& args;
    float (&acc)[kNBlocks][BLOCK_M / 2];
    Pipeline& pipeline;
    PingPong& ping_pong;
    uint32_t lane_weights, lane_scales, weight_scales;
    float low, high;  // scales of weights (kBlock128)
    uint32_t a[4][4];

    __device__ __forceinline__ Mainloop(const GemmArgs& args, float (&acc)[kNBlocks][BLOCK_M / 2], Pipeline& pipeline,
                                        PingPong& ping_pong)
        : args(args), acc(acc), pipeline(pipeline), ping_pong(ping_pong) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
        lane_weights = opaque(warpgroup * kNBlocks * kBlockBytes + warp % 4 * kTile16Bytes + lane_piece());
        lane_scales = opaque(S::kScales + lane % 4 * 8);
        weight_scales = opaque(S::kScales + BLOCK_M * 4 + (PART == kDown ? warpgroup * 4 : 0));
    }

    // The codes of a block: in four parts of 32 columns, rows g and g + 8.
    __device__ __forceinline__ void load(uint32_t stage, int m) {
        const uint32_t from =
            opaque(stage + lane_weights + m * kBlockBytes);  // nothing of it is kept for another block
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            ldmatrix_x4(a[part], from ^ part * kPartBytes);
        }
    }

    // 128 columns of a block by M rows of x from FIRST on; the sums times both scales are accumulated.
    template <int M, int FIRST>
    __device__ __forceinline__ void mma_chain(float (&acc)[BLOCK_M / 2], uint32_t stage) {
        const uint32_t x = smem_desc_units(stage) + (S::kX + FIRST * 128) / 16;
        float sum[M / 2];
        if (kPingPong) ping_pong.wait();
        wgmma_fence();
        WgmmaRS<M>::set_e4m3(sum, a[0], make_smem_desc_units(x));
#pragma unroll
        for (int part = 1; part < 4; ++part) WgmmaRS<M>::add_e4m3(sum, a[part], make_smem_desc_units(x + part * 2));
        wgmma_commit();
        wgmma_wait<0>();
        if (kPingPong) ping_pong.pass();
        if constexpr (SCALES == kChannel) {
#pragma unroll
            for (int i = 0; i < M / 2; ++i) {
                materialize(sum[i]);
                acc[FIRST / 2 + i] += sum[i];
            }
        } else {
            accumulate<M, FIRST>(acc, sum, stage);
        }
    }

    // Sums of 128 columns times both scales.
    template <int M, int FIRST>
    __device__ __forceinline__ void accumulate(float (&acc)[BLOCK_M / 2], float (&sum)[M / 2], uint32_t stage) {
#pragma unroll
        for (int n = 0; n < M / 8; ++n) {
            float scales[4];
            const uint2 v = ld_shared_v2(stage + lane_scales + (FIRST / 8 + n) * 32);
            scales[0] = __uint_as_float(v.x) * low, scales[1] = __uint_as_float(v.y) * low;
            scales[2] = PART == kDown ? scales[0] : __uint_as_float(v.x) * high;
            scales[3] = PART == kDown ? scales[1] : __uint_as_float(v.y) * high;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& to = acc[FIRST / 2 + 4 * n + i];
                materialize(sum[4 * n + i]);
                to = fmaf(sum[4 * n + i], scales[i], to);
            }
        }
    }

    // All columns' sums times the scales, of which those of rows of x are in any of the stages. `held`: in shared
    // memory, since all registers are taken until then.
    template <int ROWS>
    __device__ __forceinline__ void scale(uint32_t stage, const QueuedTile& held) {
        const int n_block = held.n_block + static_cast<int>(threadIdx.x) / 128 * kNBlocks;
#pragma unroll
        for (int m = 0; m < kNBlocks; ++m) {
            const ChannelScales<1> channels(args, held.rows.expert, n_block + m);
            const uint32_t row_scales = opaque(stage + S::kScales + threadIdx.x % 4 * 8);
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n) {
                const uint2 v = ld_shared_v2(row_scales + n * 32);
                const float rows[2] = {__uint_as_float(v.x), __uint_as_float(v.y)};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    acc[m][4 * n + i] *= rows[i] * channels.low[0];
                    acc[m][4 * n + 2 + i] *= rows[i] * channels.high[0];
                }
            }
        }
    }

    template <int ROWS>
    __device__ __forceinline__ void run(int k_blocks, const QueuedTile& held) {
        constexpr int M = ROWS <= kWidest ? ROWS : ROWS / 2;
        clear<ROWS / 2>(acc);
        for (int left = k_blocks; left > 0; --left) {
            const uint32_t stage = pipeline.wait_full();
            if (!TILES) fence_proxy_async();  // x was copied by threads
            if constexpr (SCALES == kBlock128) {
                if (PART == kDown) {
                    low = __uint_as_float(ld_shared(stage + weight_scales));
                } else {
                    const uint2 v = ld_shared_v2(stage + weight_scales);
                    low = __uint_as_float(v.x), high = __uint_as_float(v.y);
                }
            }
#pragma unroll
            for (int m = 0; m < kNBlocks; ++m) {
                load(stage, m);
                mma_chain<M, 0>(acc[m], stage);
                if constexpr (M < ROWS) mma_chain<M, M>(acc[m], stage);
            }
            if constexpr (SCALES == kChannel) {
                if (left == 1) scale<ROWS>(stage, held);
            }
            __syncwarp();  // not needed, but without it ptxas is two registers short
            mbarrier_arrive(pipeline.empty_barrier());
            pipeline.advance();
        }
    }
};

// All that a stage needs, 128 columns of the tiles at a time. Where one thread does not copy them in bulk, each thread
// has the scales of two rows, on their way to registers while a stage is not empty yet.
template <Scales SCALES, int BLOCK_M, int PART, bool TILES>
struct Producer : StageCopies<Producer<SCALES, BLOCK_M, PART, TILES>, Stage<BLOCK_M>, SCALES, BLOCK_M, PART, TILES,
                              TILES && SCALES == kBlock128> {
    using S = Stage<BLOCK_M>;
    static constexpr bool kOneThread = TILES && SCALES == kBlock128;
    using Copies = typename Producer::StageCopies;
    using Copies::args, Copies::pipeline, Copies::thread, Copies::scales, Copies::source, Copies::StageCopies;
    static constexpr int kThreads = 128;
    static_assert(BLOCK_M / 2 <= kThreads);
    // Of scales and of x; and of bulk copies.
    static constexpr int kThreadArrivals = kOneThread ? 0 : TILES ? 1 : 2;
    static constexpr int kArrivals = 1 + kThreadArrivals * kThreads;
    const float* second_scales;
    WeightScales weight_scales;
    float scale[2], weights[2];

    __device__ __forceinline__ void find(WorkTile tile, int n_tile) {
        if constexpr (SCALES == kBlock128) weight_scales = WeightScales::of<PART>(args, tile.expert, n_tile);
        this->find_x(tile);
        if constexpr (TILES) {
            if (!kOneThread) scales += min(2 * thread, padded_rows(tile.rows) - 2);
            if constexpr (SCALES == kChannel) scale[0] = scales[0], scale[1] = scales[1];
        } else if constexpr (SCALES == kChannel) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = min(2 * thread + i, tile.rows - 1);
                scale[i] = row_scale<PART>(args, source(tile, row), tile.row + row);
            }
        } else {
            scales = this->scales_of(tile, 2 * thread), second_scales = this->scales_of(tile, 2 * thread + 1);
        }
    }

    __device__ __forceinline__ void fetch_scales(WorkTile tile, int k_block) {
        if (SCALES == kChannel || 2 * thread >= tile.rows) return;
        if constexpr (!TILES) {
            scale[0] = scales[k_block], scale[1] = second_scales[k_block];
        }
        weights[0] = weight_scales.first[k_block], weights[1] = weight_scales.second[k_block];
    }

    __device__ __forceinline__ void store_scales(WorkTile tile, uint32_t stage) {
        if (2 * thread >= tile.rows) return;
        const uint32_t to = stage + S::kScales;
        if (!kOneThread) {
            st_shared(to + thread * 8, __float_as_uint(scale[0]));
            st_shared(to + thread * 8 + 4, __float_as_uint(scale[1]));
        }
        if (SCALES == kBlock128 && thread == 0) {
            st_shared(to + BLOCK_M * 4, __float_as_uint(weights[0]));
            st_shared(to + BLOCK_M * 4 + 4, __float_as_uint(weights[1]));
        }
    }

    __device__ __forceinline__ void copy_bulk(WorkTile tile, const uint8_t* codes, uint32_t bytes, int k_block,
                                              uint32_t stage, uint32_t barrier) {
        if (kOneThread) store_scales(tile, stage);
        if (thread == 0) this->template copy<true>(tile, codes, bytes, k_block, stage, barrier);
    }

    __device__ __forceinline__ void copy_rows(WorkTile tile, int k_block, uint32_t stage, uint32_t barrier) {
        if constexpr (!TILES) {
            this->gather(tile, k_block, stage);
            cp_async_mbarrier_arrive(barrier);
        }
        if (!kOneThread) {
            store_scales(tile, stage);
            mbarrier_arrive(barrier);
        }
    }

    __device__ __forceinline__ bool idle() const { return kOneThread && thread; }

    __device__ __forceinline__ void end() const {
        for (int i = thread == 0 ? -1 : 0; i < kThreadArrivals; ++i) mbarrier_arrive(pipeline.full_barrier());
    }
};

}  // namespace w8a8

// 256 rows of weights by up to BLOCK_M rows of x, in MMAs for as many or, where that is enough, for one of the smaller
// WIDTHS.
template <Scales SCALES, int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M,
          int... WIDTHS>
__device__ __forceinline__ void w8a8_gemm(const GemmArgs& args) {
    using namespace w8a8;
    constexpr bool kTiles = PART == kDown || PART == kGateUpTiles;
    constexpr int kPart = PART == kGateUpTiles ? kGateUp : PART;
    using Producer = w8a8::Producer<SCALES, BLOCK_M, kPart, kTiles>;
    static_assert(WARPGROUPS == kWarpgroups && N_BLOCKS == kNBlocks && K_BLOCKS * 64 == kE4m3BlockK);
    static_assert(w8a8::Stage<BLOCK_M>::kBytes == STAGE_BYTES);
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ Turns<kWarpgroups> turns;
    __shared__ float amax[3 * BLOCK_M];
    __shared__ TileQueue queue;
    __shared__ QueuedTile held_tiles[kWarps];  // kChannel
    const int warp = warp_uniform(threadIdx.x / 32);
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, Producer::kArrivals, kWarps * 32, queue, turns);
    for (int i = threadIdx.x; i < 3 * BLOCK_M; i += blockDim.x) amax[i] = 0.0f;
    __syncthreads();
    begin_launch<PART>();
    const int n_tiles = (args.n + 255) / 256, total = warp_uniform(args.tiles->work_tiles) * n_tiles;

    if (warp >= kWarps) {
        reg_dealloc<40>();
        pipeline.parity = 1;
        begin_x<PART>();
        Producer producer(args, pipeline, threadIdx.x - kWarps * 32);
        producer.template run<TileTaker<kTileBytes / kBlockBytes>>(queue, total, n_tiles);
        return;
    }
    reg_alloc<232>();
    pipeline.parity = 0;
    const int warpgroup = warp / 4, n_blocks = args.n / 64;
    PingPong ping_pong = turns.of(warpgroup, 1 - warpgroup);
    float acc[kNBlocks][BLOCK_M / 2];
    int buffer = 0;  // of amax
    queue.consume(pipeline, total, [&](QueuedTile queued) {
        QueuedTile& held = held_tiles[warp];
        if (SCALES == kChannel) {
            if (threadIdx.x % 32 == 0) held = queued;
            __syncwarp();
        }
        Mainloop<SCALES, BLOCK_M, kPart, kTiles> mainloop(args, acc, pipeline, ping_pong);
        with_narrowest<WIDTHS..., BLOCK_M>(queued.rows.rows, [&](auto width) {
            mainloop.template run<decltype(width)::value>(args.k / kE4m3BlockK, held);
        });
        if (SCALES == kChannel) {  // the lane that writes it reads for all
            queued = {};
            if (threadIdx.x % 32 == 0) queued = held;
            queued = {uniform_tile(queued.rows), warp_uniform(queued.n_block)};
        }
        const WorkTile tile = queued.rows;
        const int n_block = queued.n_block;
        if constexpr (PART == kDown) {
#pragma unroll
            for (int m = 0; m < kNBlocks; ++m) {
                const int block = n_block + warpgroup * kNBlocks + m;
                if (block < n_blocks) store_y<BLOCK_M, 4>(args, acc[m], tile, block);
            }
        } else if constexpr (SCALES == kChannel) {
            store_h_f32<PART, kNBlocks, BLOCK_M>(args, acc, tile, n_block);
        } else {
            store_h_e4m3<kWarpgroups, kNBlocks, BLOCK_M, WholeSums>(args, acc, tile, n_block, nullptr, amax, buffer);
            if (++buffer == 3) buffer = 0;
        }
    });
}

}  // namespace polymoe
