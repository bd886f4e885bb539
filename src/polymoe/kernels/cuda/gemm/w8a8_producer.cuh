// How stages of E4M3 weights and E4M3 rows are filled: for the kernels that multiply both as they are.
//
// One thread copies weights, and permuted tiles of x. Rows of x that are not in tiles are gathered by four warps: eight
// lanes have a row, 16 columns each, and the next row kAtOnce further on. How scales come is the kernel's own.
#pragma once
#include "../dequant/e4m3.cuh"
#include "../ptx/compiler.cuh"
#include "schedule.cuh"

namespace polymoe {
namespace w8 {

// Producer: the class that derives from this one. It finds a tile's x and scales, fetches scales for 128 columns, and
// fills a stage. ONE_THREAD: permuted tiles come with their scales for 128 columns, all in bulk copies.
template <class Producer, class S, Scales SCALES, int BLOCK_M, int PART, bool TILES, bool ONE_THREAD>
struct StageCopies {
    static constexpr int kAtOnce = 16, kTimes = (BLOCK_M + kAtOnce - 1) / kAtOnce;
    static_assert(kAtOnce % 8 == 0);
    const GemmArgs& args;
    Pipeline& pipeline;
    const int thread, first, piece;  // of the work tile's rows; of a row's 128 columns
    const uint32_t place;            // of the first row's piece in a stage
    uint32_t from[kTimes];           // the rows' pieces, in units of 16 bytes
    const uint8_t* x;                // of the work tile, where it comes in tiles
    const float* scales;             // of the same

    __device__ __forceinline__ StageCopies(const GemmArgs& args, Pipeline& pipeline, int thread)
        : args(args),
          pipeline(pipeline),
          thread(thread),
          first(thread / 8),
          piece(thread % 8),
          place(opaque(S::kX + first * 128 + (piece ^ (first % 8)) * 16)) {}

    // Of a row of x, in units of 16 bytes; of the last one where the work tile has no such row.
    __device__ __forceinline__ uint32_t source(WorkTile tile, int row) const {
        const int permuted_row = tile.row + min(row, tile.rows - 1);
        if (SCALES == kChannel) return x_row<PART>(args, permuted_row) * (row_bytes(args.k) / 16);
        return args.permuted_to_expanded[permuted_row] / args.top_k * (row_bytes(args.k) / 16);
    }

    __device__ __forceinline__ void find_x(WorkTile tile) {
        if constexpr (TILES) {
            const int padded = padded_rows(tile.rows), k_blocks = args.k / kE4m3BlockK;
            x = reinterpret_cast<const uint8_t*>(args.x) +
                static_cast<long long>(tile.padded_row) * k_blocks * kE4m3RowBytes;
            scales = reinterpret_cast<const float*>(x + k_blocks * padded * 128);
        } else {
#pragma unroll
            for (int i = 0; i < kTimes; ++i) from[i] = source(tile, first + i * kAtOnce) + piece;
        }
    }

    // Of the same row of x.
    __device__ __forceinline__ const float* scales_of(WorkTile tile, int row) const {
        return reinterpret_cast<const float*>(reinterpret_cast<const uint4*>(args.x) + source(tile, row) + args.k / 16);
    }

    // All bulk copies, by one thread.
    template <bool EVICT_FIRST>
    __device__ __forceinline__ void copy(WorkTile tile, const uint8_t* codes, uint32_t bytes, int k_block,
                                         uint32_t stage, uint32_t barrier) {
        const uint32_t rows = TILES ? padded_rows(tile.rows) : 0, x_bytes = rows * 128;
        const uint32_t scale_bytes = ONE_THREAD ? rows * 4 : 0;
        mbarrier_arrive_expect_tx(barrier, bytes + x_bytes + scale_bytes);
        if (EVICT_FIRST) {
            bulk_copy_g2s_evict_first(stage, codes, bytes, barrier);
        } else {
            bulk_copy_g2s(stage, codes, bytes, barrier);
        }
        if (TILES) bulk_copy_g2s(stage + S::kX, x + k_block * x_bytes, x_bytes, barrier);
        if (ONE_THREAD) bulk_copy_g2s(stage + S::kScales, scales + k_block * rows, scale_bytes, barrier);
    }

    __device__ __forceinline__ void gather(WorkTile tile, int k_block, uint32_t stage) {
        const uint4* columns = reinterpret_cast<const uint4*>(args.x) + k_block * 8;
#pragma unroll
        for (int i = 0; i < kTimes; ++i) {
            if (first + i * kAtOnce < tile.rows) cp_async_16(stage + place + i * kAtOnce * 128, columns + from[i]);
        }
    }

    // All stages of all tiles. The first thread takes tiles, the next one ahead of its use.
    template <class Taker>
    __device__ __forceinline__ void run(TileQueue& queue, int total, int n_tiles) {
        Producer& producer = static_cast<Producer&>(*this);
        const int k_blocks = args.k / kE4m3BlockK;
        if (producer.idle()) return;
        Taker taker(args, total, n_tiles, blockIdx.x);
        const auto next_tile = [&] {
            if (thread == 0) take_tile(taker, queue, pipeline);
            if (!ONE_THREAD) __syncwarp();
            return queue.wait(pipeline);
        };
        for_each_tile(total, next_tile, [&](QueuedTile queued) {
            const WorkTile tile = queued.rows;
            const int n_tile = queued.n_block / (kTileBytes / kBlockBytes);
            const uint32_t together = min(kTileBytes, args.n * 128 - n_tile * kTileBytes);
            const uint8_t* codes = args.codes + tile.expert * args.codes_stride + 256LL * n_tile * args.k;
            uint32_t bytes = together;
            if constexpr (S::kX < kTileBytes) {  // a part of the 256 rows
                const uint32_t skipped = queued.n_block % (kTileBytes / kBlockBytes) * kBlockBytes;
                codes += skipped, bytes = min(static_cast<uint32_t>(S::kX), together - skipped);
            }
            producer.find(tile, n_tile);
            producer.fetch_scales(tile, 0);
#pragma unroll 1
            for (int k_block = 0; k_block < k_blocks; ++k_block) {
                const uint32_t barrier = pipeline.full_barrier(), stage = pipeline.address();
                pipeline.wait_empty();
                if (thread == 0 && k_block) queue.announce(pipeline);
                producer.copy_bulk(tile, codes, bytes, k_block, stage, barrier);
                codes += together;
                producer.copy_rows(tile, k_block, stage, barrier);
                if (k_block + 1 < k_blocks) producer.fetch_scales(tile, k_block + 1);
                pipeline.advance();
            }
            if (thread == 0) taker.look_up();
        });
        producer.end();
    }
};

}  // namespace w8
}  // namespace polymoe
