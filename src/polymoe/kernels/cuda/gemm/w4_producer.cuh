// Stages of weights of 4 or 8 bits and permuted tiles of x, and the warps that fill them: for the kernels that
// dequantize in registers and multiply by wgmma.
#pragma once
#include "../dequant/block_columns.cuh"
#include "../pipeline.cuh"
#include "gathered_rows.cuh"
#include "schedule.cuh"

namespace polymoe {

// Permuted tiles of x have 128 bytes per row: columns of a tile, and bytes of a row's scale.
struct Bf16Tiles {
    static constexpr int kColumns = 64, kScaleBytes = 0;
};

// After a work tile's tiles come the rows' float32 scales, tile by tile.
struct E4m3Tiles {
    static constexpr int kColumns = kE4m3BlockK, kScaleBytes = kE4m3RowBytes - kE4m3BlockK;
};

// N_BLOCKS times 64 rows of weights, K_BLOCKS times 64 columns: x and its scales, then the weights' codes, then theirs.
template <class F, class X, int N_BLOCKS, int BLOCK_M, int K_BLOCKS>
struct W4Stage {
    static_assert(K_BLOCKS * 64 % X::kColumns == 0);
    static constexpr int kBlocks = K_BLOCKS * kStepWords<F>;  // along K
    static constexpr int kScaleBlocks = (kBlocks + F::kScaleBlocks - 1) / F::kScaleBlocks;
    static constexpr int kBlockCodes = kBlocks * 2048, kBlockScales = kScaleBlocks * F::kScaleBytes;
    static constexpr int kTiles = K_BLOCKS * 64 / X::kColumns, kXScales = kTiles * BLOCK_M * 128;
    static constexpr int kCodes = kXScales + kTiles * BLOCK_M * X::kScaleBytes,
                         kScales = kCodes + N_BLOCKS * kBlockCodes;
    static constexpr int kBytes = (kScales + N_BLOCKS * kBlockScales + 1023) / 1024 * 1024;
};

// By one thread: `columns` columns, in `blocks` blocks, of up to 64 rows of weights, which are `width` tiles of 16
// rows.
template <class F>
__device__ __forceinline__ void copy_codes(uint32_t to, const uint8_t* codes, int width, int columns, int blocks,
                                           uint32_t barrier) {
    if (width == 4) {
        bulk_copy_g2s(to, codes, columns * kColumnBytes<F>, barrier);
    } else {  // blocks are as far apart as if they had all their rows
        const int narrow = opaque(width);
#pragma unroll 1
        for (int b = 0; b < blocks; ++b) {
            bulk_copy_g2s(to + b * 2048, codes + b * narrow * 512,
                          min(kBlockColumns<F>, columns - b * kBlockColumns<F>) * (kColumnBytes<F> / 4) * narrow,
                          barrier);
        }
    }
}

// Once all tiles are copied, by every thread that copied: the stage after them becomes full for consumers, who see that
// none is left, and the next kernel may rely on this one having waited for the kernel ahead of it. One CTA is enough
// for that; others without work leave their SMs to the next kernel.
template <bool GATHERS>
__device__ __forceinline__ void end_w4(const GemmArgs& args, Pipeline& pipeline, bool leader, bool idle, bool waited) {
    pipeline.wait_empty();
    if (leader) mbarrier_arrive(pipeline.full_barrier());
    if (GATHERS) mbarrier_arrive(pipeline.full_barrier());
    if ((blockIdx.x == 0 || !idle) && (!waited || args.second_launch)) grid_dependency_wait();
    if constexpr (GATHERS) {  // until copies have landed
        for (int i = 1; i < pipeline.stages; ++i) {
            pipeline.advance();
            pipeline.wait_empty();
        }
    }
}

// One thread of each of four warps: a single thread cannot issue copies fast enough. Where they gather rows of x, which
// is by token, all lanes. `n_tiles` is the number of tiles along N.
template <class F, class X, int N_BLOCKS, int BLOCK_M, int K_BLOCKS, int PART, bool GATHERS = false>
__device__ __forceinline__ void produce_w4(const GemmArgs& args, Pipeline& pipeline, TileQueue& queue, int producer,
                                           const LaunchOrder& order, int n_tiles) {
    using S = W4Stage<F, X, N_BLOCKS, BLOCK_M, K_BLOCKS>;
    constexpr int kProducers = kProducerWarps, kMine = (N_BLOCKS + kProducers - 1) / kProducers;
    const bool leader = !GATHERS || threadIdx.x % 32 == 0, takes = producer == 0 && leader;
    const bool copies_x = !GATHERS && producer == (N_BLOCKS % kProducers == 0 ? 0 : kProducers - 1);  // the least busy
    [[maybe_unused]] GatheredRows<BLOCK_M> gathered;
    const int tiles16 = args.n / 16, k_blocks = (args.k + 63) / 64;
    constexpr int kScaleColumns = kBlockColumns<F> * F::kScaleBlocks;
    const int row_scales = (args.k + kScaleColumns - 1) / kScaleColumns;
    const int total = order.work_tiles * n_tiles;
    WaitForX wait_for_x{order.waited<PART>()};
    bool idle = true;
    TileTaker<N_BLOCKS> taker(args, total, n_tiles,
                              static_cast<int>(blockIdx.x) < args.tiles->ctas ? blockIdx.x : total);
    const auto next_tile = [&] {
        QueuedTile queued;
        if (takes) queued = take_tile(taker, queue, pipeline);
        if (GATHERS) __syncwarp();
        if (GATHERS || !takes) queued = queue.wait(pipeline);
        return QueuedTile{queued.rows, of_first_lane(queued.n_block)};
    };
    for_each_tile(total, next_tile, [&](QueuedTile queued) {
        const WorkTile tile = queued.rows;
        const int n_block = queued.n_block;
        idle = false;
        const int padded = padded_rows(tile.rows), x_tiles = (args.k + X::kColumns - 1) / X::kColumns;
        const uint8_t *codes[kMine], *scales[kMine];
        int width[kMine];  // tiles of 16 rows
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int inner = i * kProducers + producer, block = n_block + inner;
            width[i] = inner < N_BLOCKS ? max(0, min(4, tiles16 - 4 * block)) : 0;
            codes[i] =
                args.codes + tile.expert * args.codes_stride + static_cast<long long>(kColumnBytes<F>) * block * args.k;
            scales[i] = args.scales + tile.expert * args.scales_stride +
                        static_cast<long long>(block) * row_scales * F::kScaleBytes;
        }
        const uint8_t* x = reinterpret_cast<const uint8_t*>(args.x) +
                           static_cast<long long>(tile.padded_row) * x_tiles * (128 + X::kScaleBytes);
        const uint8_t* x_scales = x + x_tiles * padded * 128;
        if constexpr (GATHERS) gathered.begin(args, tile, producer);
        for (int k_block = 0; k_block < k_blocks; k_block += K_BLOCKS) {
            const uint32_t barrier = pipeline.full_barrier(), to = pipeline.address();
            const int blocks_64 = min(K_BLOCKS, k_blocks - k_block),
                      columns = min(blocks_64 * 64, args.k - k_block * 64);
            const int blocks = kStepWords<F> == 1 ? blocks_64 : (columns + kBlockColumns<F> - 1) / kBlockColumns<F>;
            const int scale_bytes = (blocks + F::kScaleBlocks - 1) / F::kScaleBlocks * F::kScaleBytes;
            const int x_rows = (columns + X::kColumns - 1) / X::kColumns * padded;  // rows of tiles
            uint32_t bytes = copies_x ? x_rows * (128 + X::kScaleBytes) : 0;
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                bytes += width[i] ? width[i] * columns * (kColumnBytes<F> / 4) + scale_bytes : 0;
            }
            pipeline.wait_empty();
            if (takes && k_block) queue.announce(pipeline);
            if (leader) mbarrier_arrive_expect_tx(barrier, bytes);
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                if (leader && width[i]) {
                    const int inner = i * kProducers + producer;
                    const uint32_t to_codes = to + S::kCodes + inner * S::kBlockCodes;
                    // Where two blocks share scales and a stage has one, the second stage gets the same scales
                    // again.
                    const int first_scale = k_block * kStepWords<F> / F::kScaleBlocks * F::kScaleBytes;
                    copy_codes<F>(to_codes, codes[i], width[i], columns, blocks, barrier);
                    bulk_copy_g2s(to + S::kScales + inner * S::kBlockScales, scales[i] + first_scale, scale_bytes,
                                  barrier);
                    codes[i] += width[i] * (S::kBlockCodes / 4);
                }
            }
            if constexpr (GATHERS) {
#pragma unroll
                for (int i = 0; i < K_BLOCKS; ++i) {
                    if (i < blocks_64) gathered.copy(args, to + i * padded * 128, k_block + i, producer);
                }
                cp_async_mbarrier_arrive(barrier);
            }
            if (copies_x) {
                wait_for_x();
                bulk_copy_g2s(to, x, x_rows * 128, barrier);
                x += x_rows * 128;
                if constexpr (X::kScaleBytes != 0) {
                    bulk_copy_g2s(to + S::kXScales, x_scales, x_rows * X::kScaleBytes, barrier);
                    x_scales += x_rows * X::kScaleBytes;
                }
            }
            pipeline.advance();
        }
        if (takes) taker.look_up();
    });
    end_w4<GATHERS>(args, pipeline, leader, idle, wait_for_x.waited);
}

}  // namespace polymoe
