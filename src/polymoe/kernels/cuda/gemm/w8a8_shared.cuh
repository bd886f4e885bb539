// E4M3 weights and E4M3 rows, multiplied as they are, both from shared memory, for many rows.
//
// As in w8a8.cuh, sums of 128 columns are multiplied by the scales of 128 x 128 weights and of 128 columns of a row of
// x, and accumulated in float32 (shared_mainloop.cuh). One persistent CTA per SM walks over the tiles (a work tile by
// 256 rows of weights, 128 for each of two consumer warpgroups). Producer warps keep a pipeline full.
//
// Rows of x are gathered, unless they come in permuted tiles (TILES), as h does; epilogue/e4m3_tiles.cuh describes
// them. y is by permuted row.
#pragma once
#include "../epilogue/row_sums.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/word_copy.cuh"
#include "expert_tiles.cuh"
#include "shared_mainloop.cuh"
#include "w8a8_producer.cuh"
#include "widths.cuh"

namespace polymoe {

namespace w8a8_shared {

using namespace w8;

// 128 columns of the tile's weights, of x, and the scales.
template <int BLOCK_M>
struct Stage : polymoe::Stage<kTileBytes, BLOCK_M * 128, BLOCK_M * 4 + 16> {
    static constexpr int kWeights = 0, kRowScales = Stage::kScales;
};

template <int BLOCK_M, int PART, bool TILES>
struct Mainloop : SharedMainloop<Mainloop<BLOCK_M, PART, TILES>, Stage<BLOCK_M>, BLOCK_M> {
    using S = Stage<BLOCK_M>;
    using Base = typename Mainloop::SharedMainloop;
    using Base::pipeline;
    uint32_t weight_scales;  // in a stage

    __device__ __forceinline__ Mainloop(RowSums<BLOCK_M>& acc, Pipeline& pipeline) : Base(acc, pipeline) {
        const int warpgroup = threadIdx.x / 128;
        weight_scales = opaque(S::kScales + BLOCK_M * 4 + (PART == kDown ? warpgroup * 4 : 0));
    }

    template <int ROWS>
    __device__ __forceinline__ void run(int k_blocks) {
        this->template clear<ROWS>();
        this->template add<ROWS, kE4m3BlockK>(k_blocks);
    }

    __device__ __forceinline__ uint32_t wait() const {
        const uint32_t stage = pipeline.wait_full();
        if (!TILES) fence_proxy_async();  // x was copied by threads
        return stage;
    }

    // Scales of rows times those of gate and of up, or of the warpgroup's weights.
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
            const float of_row = this->row_scale(stage, m, i);
#pragma unroll
            for (int j = 0; j < 2; ++j) scales[i][j] = of_row * of_weights[j];
        }
    }

    __device__ __forceinline__ void release() const { mbarrier_arrive(pipeline.empty_barrier()); }
};

// All that a stage needs, 128 columns of the tiles at a time. Where rows of x are gathered, so are their scales, one by
// a thread.
template <int BLOCK_M, int PART, bool TILES>
struct Producer : StageCopies<Producer<BLOCK_M, PART, TILES>, Stage<BLOCK_M>, kBlock128, BLOCK_M, PART, TILES, TILES> {
    using S = Stage<BLOCK_M>;
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

// 256 rows of weights by up to BLOCK_M rows of x, in MMAs for as many or, where that is enough, for one of the smaller
// WIDTHS.
template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void w8a8_shared_gemm(const GemmArgs& args) {
    using namespace w8a8_shared;
    constexpr bool kTiles = PART == kDown || PART == kGateUpTiles;
    constexpr int kPart = PART == kGateUpTiles ? kGateUp : PART;
    using Producer = w8a8_shared::Producer<BLOCK_M, kPart, kTiles>;
    static_assert(WARPGROUPS == kWarpgroups && N_BLOCKS == kNBlocks && K_BLOCKS * 64 == kE4m3BlockK);
    static_assert(w8a8_shared::Stage<BLOCK_M>::kBytes == STAGE_BYTES);
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ float maxima[2][kWarpgroups][BLOCK_M];  // of rows of h, for two alternating tiles
    __shared__ TileQueue queue;
    const int warp = warp_uniform(threadIdx.x / 32);
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, Producer::kArrivals, kWarps * 32, queue);
    __syncthreads();
    begin_launch<PART>();
    const int n_tiles = (args.n + 255) / 256, total = warp_uniform(args.tiles->work_tiles) * n_tiles;

    if (warp >= kWarps) {
        reg_dealloc<56>();
        pipeline.parity = 1;
        begin_x<PART>();
        Producer producer(args, pipeline, threadIdx.x - kWarps * 32);
        producer.template run<ExpertTiles<kTileBytes / kBlockBytes>>(queue, total, n_tiles);
        return;
    }
    reg_alloc<224>();
    pipeline.parity = 0;
    const int warpgroup = warp / 4, n_blocks = args.n / 64;
    RowSums<BLOCK_M> acc;
    int buffer = 0;  // of maxima
    queue.consume(pipeline, total, [&](QueuedTile queued) {
        const WorkTile tile = queued.rows;
        Mainloop<BLOCK_M, kPart, kTiles> mainloop(acc, pipeline);
        with_narrowest<WIDTHS..., BLOCK_M>(
            tile.rows, [&](auto width) { mainloop.template run<decltype(width)::value>(args.k / kE4m3BlockK); });
        const int n_block = queued.n_block + warpgroup * kNBlocks;
        if (n_block >= n_blocks) return;
        add_bias<kPart, BLOCK_M>(args, acc, tile, n_block);
        if constexpr (PART == kDown) {
            store_y_rows<BLOCK_M>(args, acc, tile, n_block);
        } else {
            store_h_tiles<BLOCK_M>(args, acc, tile, n_block, maxima[buffer]);
            buffer ^= 1;
        }
    });
}

}  // namespace polymoe
