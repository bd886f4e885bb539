// E4M3 weights and E4M3 rows, multiplied as they are, both from shared memory, for many rows.
//
// As in w8a8.cuh, sums of 128 columns are multiplied by the scales of 128 x 128 weights and of 128 columns of a row of
// x, and accumulated in float32. Here M of the MMA runs over rows of x, and N over rows of weights: of 64 rows of x a
// thread has sums of two, so that it needs few scales, and neither operand passes through registers. One persistent CTA
// per SM walks over the tiles (a work tile by 256 rows of weights, 128 for each of two consumer warpgroups). Producer
// warps keep a pipeline of weights, x and scales full. A warpgroup accumulates while the other's MMAs run.
//
// Where tiles are fewer than SMs, one warpgroup has tiles of 128 rows of weights. No CTA then has all rows that give
// the 128 columns of h that share a scale: h is written in float32, and rounded by a launch between the GEMMs.
//
// Rows of x are gathered, unless they come in permuted tiles (TILES), as h does; epilogue/e4m3_tiles.cuh describes
// them. y is by permuted row.
#pragma once
#include "../epilogue/row_sums.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "w8a8_producer.cuh"
#include "widths.cuh"

namespace polymoe {

namespace w8a8_shared {

using namespace w8;

constexpr int kMmaRows = 64, kMmaColumns = 128;  // rows of x and of weights

// 128 columns of the tile's weights, of x, and the scales.
template <int WARPGROUPS, int BLOCK_M>
using Stage = polymoe::Stage<WARPGROUPS * kMmaColumns * kE4m3BlockK, BLOCK_M * 128, BLOCK_M * 4 + 16>;

// All of K for the warpgroup's rows of weights and the work tile's rows, one chain of MMAs of 128 columns for each 64
// rows after the other.
template <int WARPGROUPS, int BLOCK_M, int PART, bool TILES>
struct Mainloop {
    using S = Stage<WARPGROUPS, BLOCK_M>;
    RowSums<BLOCK_M>& acc;
    Pipeline& pipeline;
    uint32_t weights, row_scales, weight_scales;  // in a stage

    // half: of the 256 rows of weights that lie together.
    __device__ __forceinline__ Mainloop(RowSums<BLOCK_M>& acc, Pipeline& pipeline, int half)
        : acc(acc), pipeline(pipeline) {
        const int warp = threadIdx.x / 32, warpgroup = warp / 4, g = threadIdx.x % 32 / 4;
        weights = warp_uniform(warpgroup * kMmaColumns * kE4m3BlockK / 16);
        row_scales = opaque(S::kScales + (warp % 4 * 16 + g) * 4);
        weight_scales = opaque(S::kScales + BLOCK_M * 4 + (PART == kDown ? half * 4 : 0));
    }

    template <int ROWS>
    __device__ __forceinline__ void run(int k_blocks) {
        constexpr int kBlocks = ROWS / kMmaRows;
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
            for (int i = 0; i < kMmaColumns / 2; ++i) acc[m][i] = 0.0f;
        }
        for (int left = k_blocks; left > 0; --left) {
            const uint32_t stage = pipeline.wait_full();
            if (!TILES) fence_proxy_async();  // x was copied by threads
#pragma unroll
            for (int m = 0; m < kBlocks; ++m) {
                float sum[kMmaColumns / 2];
                wgmma_fence();
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const uint32_t units = smem_desc_units(stage) + part * 2;
                    const uint64_t a = make_smem_desc_units(units + (S::kX + m * kMmaRows * 128) / 16);
                    const uint64_t b = make_smem_desc_units(units + weights);
                    if (part == 0) {
                        WgmmaSS<kMmaColumns>::set_e4m3(sum, a, b);
                    } else {
                        WgmmaSS<kMmaColumns>::add_e4m3(sum, a, b);
                    }
                }
                wgmma_commit();
                float scales[2][2];  // of rows g and g + 8, times those of gate and of up
                load_scales(stage, m, scales);
                wgmma_wait<0>();
                if (m == kBlocks - 1) mbarrier_arrive(pipeline.empty_barrier());
#pragma unroll
                for (int i = 0; i < kMmaColumns / 2; ++i) {
                    materialize(sum[i]);
                    acc[m][i] = fmaf(sum[i], scales[i / 2 % 2][i / 4 % 2], acc[m][i]);
                }
            }
            pipeline.advance();
        }
    }

    __device__ __forceinline__ void load_scales(uint32_t stage, int m, float (&scales)[2][2]) const {
        float of_weights[2];
        if constexpr (PART == kDown) {
            of_weights[0] = of_weights[1] = __uint_as_float(ld_shared(stage + weight_scales));
        } else {
            const uint2 v = ld_shared_v2(stage + weight_scales);
            of_weights[0] = __uint_as_float(v.x), of_weights[1] = __uint_as_float(v.y);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float of_row = __uint_as_float(ld_shared(stage + row_scales + (m * kMmaRows + i * 8) * 4));
#pragma unroll
            for (int j = 0; j < 2; ++j) scales[i][j] = of_row * of_weights[j];
        }
    }
};

// As TileTaker, in another order: of each kAtOnce work tiles, those of an expert have the same rows of weights one
// after the other. At about the same time then, so that the L2 cache has what the first of them reads.
template <int N_BLOCKS>
struct ExpertTiles {
    static constexpr int kAtOnce = 8;
    const GemmArgs& args;
    int total, n_tiles, next, n_tile;
    WorkTile rows;

    __device__ __forceinline__ ExpertTiles(const GemmArgs& args, int total, int n_tiles, int first)
        : args(args), total(total), n_tiles(n_tiles), next(first), n_tile(0), rows{} {
        look_up();
    }

    __device__ __forceinline__ int n_block() const { return n_tile * N_BLOCKS; }

    __device__ __forceinline__ void look_up() {
        if (next >= total) return;
        const int group = next / (kAtOnce * n_tiles) * kAtOnce, count = min(kAtOnce, total / n_tiles - group);
        int experts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) experts[i] = args.work_tiles[group + min(i, count - 1)].expert;
        // Of the work tiles up to the one that next / n_tiles counts: the first of its expert, and of the next expert.
        const int index = next / n_tiles - group;
        int begin = 0, end = count;
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) {
            if (i < count && experts[i] != experts[i - 1]) {
                if (i <= index) begin = i;
                if (i > index) end = min(end, i);
            }
        }
        const int inner = next - (group + begin) * n_tiles, of_expert = end - begin;
        n_tile = inner / of_expert;
        rows = args.work_tiles[group + begin + inner % of_expert];
    }
};

// All that a stage needs, 128 columns of the tiles at a time. Where rows of x are gathered, so are their scales, one by
// a thread.
template <class S, int BLOCK_M, int PART, bool TILES>
struct Producer : StageCopies<Producer<S, BLOCK_M, PART, TILES>, S, kBlock128, BLOCK_M, PART, TILES, TILES> {
    using Copies = typename Producer::StageCopies;
    using Copies::args, Copies::pipeline, Copies::thread, Copies::scales, Copies::source, Copies::StageCopies;
    static constexpr int kThreads = TILES ? 1 : 128, kArrivals = TILES ? 1 : 1 + kThreads;
    static_assert(BLOCK_M <= 128);
    WeightScales weight_scales;
    float weights[2];

    __device__ __forceinline__ void find(WorkTile tile, int n_tile) {
        weight_scales = WeightScales::of<PART>(args, tile.expert, n_tile);
        this->find_x(tile);
        if (!TILES) scales = this->scales_of(tile, thread);
    }

    __device__ __forceinline__ void fetch_scales(WorkTile tile, int k_block) {
        if (TILES) weights[0] = weight_scales.first[k_block], weights[1] = weight_scales.second[k_block];
    }

    __device__ __forceinline__ void copy_bulk(WorkTile tile, const uint8_t* codes, uint32_t bytes, int k_block,
                                              uint32_t stage, uint32_t barrier) {
        if (TILES) {
            st_shared(stage + S::kScales + BLOCK_M * 4, __float_as_uint(weights[0]));
            st_shared(stage + S::kScales + BLOCK_M * 4 + 4, __float_as_uint(weights[1]));
        }
        if (thread == 0) this->template copy<false>(tile, codes, bytes, k_block, stage, barrier);
    }

    __device__ __forceinline__ void copy_rows(WorkTile tile, int k_block, uint32_t stage, uint32_t barrier) {
        if constexpr (!TILES) {
            this->gather(tile, k_block, stage);
            const uint32_t to = stage + S::kScales;
            if (thread < tile.rows) cp_async_4(to + thread * 4, scales + k_block);
            if (thread == 0) cp_async_4(to + BLOCK_M * 4, weight_scales.first + k_block);
            if (thread == 32) cp_async_4(to + BLOCK_M * 4 + 4, weight_scales.second + k_block);
            cp_async_mbarrier_arrive(barrier);
        }
    }

    __device__ __forceinline__ bool idle() const { return thread >= kThreads; }

    __device__ __forceinline__ void end() const {
        if (thread == 0) mbarrier_arrive(pipeline.full_barrier());
        if (!TILES) mbarrier_arrive(pipeline.full_barrier());
    }
};

}  // namespace w8a8_shared

// 128 rows of weights for each warpgroup by up to BLOCK_M rows of x, in MMAs for as many or, where that is enough, for
// one of the smaller WIDTHS.
template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void w8a8_shared_gemm(const GemmArgs& args) {
    using namespace w8a8_shared;
    constexpr bool kTiles = PART == kDown || PART == kGateUpTiles;
    constexpr int kPart = PART == kGateUpTiles ? kGateUp : PART;
    constexpr int kWarps = WARPGROUPS * 4, kBlocks = WARPGROUPS * N_BLOCKS;  // of 64 rows of weights
    using S = w8a8_shared::Stage<WARPGROUPS, BLOCK_M>;
    using Producer = w8a8_shared::Producer<S, BLOCK_M, kPart, kTiles>;
    static_assert(WARPGROUPS <= kWarpgroups && N_BLOCKS == kNBlocks && K_BLOCKS * 64 == kE4m3BlockK);
    static_assert(S::kBytes == STAGE_BYTES);
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ float maxima[2][kWarpgroups][BLOCK_M];  // of rows of h, for two alternating tiles
    __shared__ TileQueue queue;
    const int warp = warp_uniform(threadIdx.x / 32);
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, Producer::kArrivals, kWarps * 32, queue);
    __syncthreads();
    begin_launch<PART>();
    const int n_tiles = (args.n + kBlocks * 64 - 1) / (kBlocks * 64);
    const int total = warp_uniform(args.tiles->work_tiles) * n_tiles;

    if (warp >= kWarps) {
        if constexpr (WARPGROUPS > 1) reg_dealloc<56>();
        pipeline.parity = 1;
        begin_x<PART>();
        Producer producer(args, pipeline, threadIdx.x - kWarps * 32);
        producer.template run<ExpertTiles<kBlocks>>(queue, total, n_tiles);
        return;
    }
    if constexpr (WARPGROUPS > 1) reg_alloc<224>();
    pipeline.parity = 0;
    const int warpgroup = warp / 4, n_blocks = args.n / 64;
    float acc[BLOCK_M / kMmaRows][kMmaColumns / 2];
    int buffer = 0;  // of maxima
    queue.consume(pipeline, total, [&](QueuedTile queued) {
        const WorkTile tile = queued.rows;
        const int half = WARPGROUPS > 1 ? warpgroup : queued.n_block / kNBlocks % 2;
        Mainloop<WARPGROUPS, BLOCK_M, kPart, kTiles> mainloop(acc, pipeline, half);
        with_narrowest<WIDTHS..., BLOCK_M>(
            tile.rows, [&](auto width) { mainloop.template run<decltype(width)::value>(args.k / kE4m3BlockK); });
        const int n_block = queued.n_block + warpgroup * kNBlocks;
        if (n_block >= n_blocks) return;
        if constexpr (PART == kDown) {
            store_y_rows<BLOCK_M>(args, acc, tile, n_block);
        } else if constexpr (WARPGROUPS == 1) {
            store_h_rows<BLOCK_M>(args, acc, tile, n_block);
        } else {
            store_h_tiles<BLOCK_M>(args, acc, tile, n_block, maxima[buffer]);
            buffer ^= 1;
        }
    });
}

}  // namespace polymoe
