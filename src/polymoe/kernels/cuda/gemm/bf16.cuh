// bfloat16 weights and rows by wgmma with both operands in shared memory, for few rows and for many: nothing is
// decoded.
//
// One persistent CTA per SM walks over the tiles (a work tile by N_BLOCKS times 64 rows of weights for each consumer
// warpgroup). Producer warps keep a pipeline of weights and x full, across tiles and work tiles.
//
// x comes in permuted tiles, as permute.cu and this kernel's own epilogue write them. Where weights lie is described in
// layouts/cuda/w16_swizzle128.py. y is by permuted row.
#pragma once
#include "../epilogue.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"

namespace polymoe {
namespace bf16 {

constexpr int kBlockBytes = 8192;  // of 64 rows of 128 bytes

// K_BLOCKS times 128 bytes of each row of the N_BLOCKS blocks of 64 rows, then x for them.
template <int N_BLOCKS, int BLOCK_M, int K_BLOCKS>
using Stage = polymoe::Stage<N_BLOCKS * K_BLOCKS * kBlockBytes, K_BLOCKS * BLOCK_M * 128>;

template <int K_BLOCKS>
constexpr int kStageBlockBytes = K_BLOCKS * kBlockBytes;

// Finishes 16 rows of weights by 8 rows of x. c: rows 2t and 2t + 1 of x for the MMA's row g, then for g + 8;
// afterwards a lane has row g of x, and the MMA's rows 2t, 2t + 1 and those 8 further on.
template <int PART>
__device__ __forceinline__ void store_eight_rows(const GemmArgs& args, const float* c, WorkTile tile, int row16, int m0,
                                                 float low_bias, float high_bias) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, m = m0 + g;
    float low[2] = {c[0], c[1]}, high[2] = {c[2], c[3]};
    if (PART != kDown && args.router_weights) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float weight =
                args.router_weights[args.permuted_to_expanded[tile.row + min(m0 + 2 * t + i, tile.rows - 1)]];
            low[i] *= weight, high[i] *= weight;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) low[i] += low_bias, high[i] += high_bias;
    if (PART == kGateUp) {
        const uint32_t v = movmatrix_trans(
            pack_bf16x2(gated_activation(args, low[0], high[0]), gated_activation(args, low[1], high[1])));
        uint16_t* out =
            static_cast<uint16_t*>(args.out) + static_cast<long long>(tile.padded_row) * ((args.n / 2 + 63) / 64 * 64);
        if (m < tile.rows) {
            *reinterpret_cast<uint32_t*>(out + permuted_tile_offset(m, row16 / 2 + 2 * t, tile.rows)) = v;
        }
        return;
    }
    if (PART == kUp) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = fmaxf(low[i], 0.0f), high[i] = fmaxf(high[i], 0.0f);
            low[i] *= low[i], high[i] *= high[i];
        }
    }
    uint2 v;
    v.x = movmatrix_trans(pack_bf16x2(low[0], low[1]));
    v.y = movmatrix_trans(pack_bf16x2(high[0], high[1]));
    if (m >= tile.rows) return;
    uint16_t* out = static_cast<uint16_t*>(args.out);
    if (PART == kDown) {
        out += static_cast<long long>(tile.row + m) * args.n + row16 + 4 * t;
    } else {
        out += static_cast<long long>(tile.padded_row) * ((args.n + 63) / 64 * 64) +
               permuted_tile_offset(m, row16 + 4 * t, tile.rows);
    }
    *reinterpret_cast<uint2*>(out) = v;
}

// The tile number `tile16` of 16 rows of weights by all rows of the work tile.
template <int PART, int BLOCK_M>
__device__ __forceinline__ void store(const GemmArgs& args, const float* acc, WorkTile tile, int tile16) {
    const int g = threadIdx.x % 32 / 4, row = tile16 * (PART == kGateUp ? 8 : 16);
    const long long bias = static_cast<long long>(tile.expert) * (PART == kGateUp ? args.n / 2 : args.n) + row;
    const void* second = PART == kGateUp ? args.up_bias : args.bias;
    const float low_bias = load_bias(args.bias, args.bias_dtype, bias + tile_row<PART>(g, 0));
    const float high_bias = load_bias(second, args.bias_dtype, bias + tile_row<PART>(g, 1));
#pragma unroll
    for (int m = 0; m < BLOCK_M / 8; ++m) {
        if (m * 8 >= tile.rows) break;
        store_eight_rows<PART>(args, &acc[m * 4], tile, tile16 * 16, m * 8, low_bias, high_bias);
    }
}

// One thread of each producer warp, since a single thread cannot issue copies fast enough. The last one copies x.
template <int N_BLOCKS>
constexpr int kProducers = N_BLOCKS < 4 ? N_BLOCKS + 1 : 4;

template <int N_BLOCKS, int BLOCK_M, int K_BLOCKS, int PART>
__device__ __forceinline__ void produce(const GemmArgs& args, Pipeline& pipeline, int producer, int total,
                                        int n_tiles) {
    using S = Stage<N_BLOCKS, BLOCK_M, K_BLOCKS>;
    constexpr int kOthers = kProducers<N_BLOCKS>, kMine = (N_BLOCKS + kOthers - 1) / kOthers;
    const bool copies_x = producer == kOthers - 1;
    const int tiles16 = args.n / 16, row_bytes = args.k * 2, k_blocks = (row_bytes + 127) / 128;
    bool waited = PART != kDown;
    for (int i_tile = blockIdx.x; i_tile < total; i_tile += gridDim.x) {
        const int index = i_tile / n_tiles, n_block = (i_tile - index * n_tiles) * N_BLOCKS;
        const WorkTile tile = args.work_tiles[index];
        const int x_bytes = padded_rows(tile.rows) * 128;
        const uint8_t* codes[kMine];
        int rows[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int inner = i * kOthers + producer, block = n_block + inner;
            rows[i] = inner < N_BLOCKS ? max(0, min(4, tiles16 - 4 * block)) * 16 : 0;
            codes[i] = args.codes + tile.expert * args.codes_stride + 64LL * block * row_bytes;
        }
        const uint8_t* x =
            reinterpret_cast<const uint8_t*>(args.x) + static_cast<long long>(tile.padded_row) * k_blocks * 128;
        for (int k_block = 0; k_block < k_blocks; k_block += K_BLOCKS) {
            const uint32_t barrier = pipeline.full_barrier(), to = pipeline.address();
            const int blocks = min(K_BLOCKS, k_blocks - k_block),
                      part_bytes = min(blocks * 128, row_bytes - k_block * 128);
            uint32_t bytes = copies_x ? blocks * x_bytes : 0;
#pragma unroll
            for (int i = 0; i < kMine; ++i) bytes += rows[i] * part_bytes;
            pipeline.wait_empty();
            mbarrier_arrive_expect_tx(barrier, bytes);
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                if (rows[i]) {
                    copy_weights<BLOCK_M>(to + (i * kOthers + producer) * kStageBlockBytes<K_BLOCKS>, codes[i],
                                          rows[i] * part_bytes, barrier);
                    codes[i] += rows[i] * part_bytes;
                }
            }
            if (copies_x) {
                if (!waited) {
                    grid_dependency_wait();
                    launch_dependents();
                    waited = true;
                }
                bulk_copy_g2s(to + S::kX, x, blocks * x_bytes, barrier);
                x += blocks * x_bytes;
            }
            pipeline.advance();
        }
    }
    // The next kernel relies on this one having waited for the kernel ahead of it.
    if (!waited) grid_dependency_wait();
}

// All of K for N_BLOCKS blocks of 64 rows of this warpgroup, and M of the work tile's rows. `width`: tiles of 16 rows
// in each block.
template <int WARPGROUPS, int N_BLOCKS, int M, int BLOCK_M, int K_BLOCKS>
__device__ __forceinline__ void mainloop(float (&acc)[N_BLOCKS][BLOCK_M / 2], Pipeline& pipeline, int k,
                                         const int (&width)[N_BLOCKS], int warpgroup, uint32_t x_step) {
    using S = Stage<WARPGROUPS * N_BLOCKS, BLOCK_M, K_BLOCKS>;
    constexpr int kStageBlock = kStageBlockBytes<K_BLOCKS>;
    const bool leader = threadIdx.x % 32 == 0;
    const int stages = k / (64 * K_BLOCKS), k_tail = k - stages * (64 * K_BLOCKS);
#pragma unroll
    for (int m = 0; m < N_BLOCKS; ++m) {
#pragma unroll
        for (int i = 0; i < M / 2; ++i) acc[m][i] = 0.0f;
    }
    uint32_t released = 0;
    for (int s = 0; s < stages; ++s) {
        const uint32_t stage = pipeline.wait_full(), weights = stage + warpgroup * N_BLOCKS * kStageBlock;
        wgmma_fence();
#pragma unroll
        for (int inner = 0; inner < K_BLOCKS; ++inner) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint64_t x = make_smem_desc(stage + S::kX + inner * x_step + step * 32);
#pragma unroll
                for (int m = 0; m < N_BLOCKS; ++m) {
                    const uint32_t block = weights + m * kStageBlock + inner * (width[m] * 2048);
                    WgmmaSS<M>::add_bf16(acc[m], make_smem_desc(block + step * 32), x);
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
        const int whole = k_tail / 64 * 4;  // steps in whole blocks; the rest of a row is not swizzled
        wgmma_fence();
        for (int step = 0; step < k_tail / 16; ++step) {
            const uint64_t x = make_smem_desc(stage + S::kX + step / 4 * x_step + step % 4 * 32);
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
                const uint32_t block = weights + m * kStageBlock, bytes = width[m] * 512;  // of a step
                const uint64_t a = step < whole ? make_smem_desc(block + step / 4 * (4 * bytes) + step % 4 * 32)
                                                : make_smem_desc_no_swizzle(block + step * bytes, bytes / 2, 128);
                WgmmaSS<M>::add_bf16(acc[m], a, x);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (leader) mbarrier_arrive(pipeline.empty_barrier());
        pipeline.advance();
    }
}

// In MMAs for M rows or, where the work tile has more, for the next of WIDER.
template <int WARPGROUPS, int N_BLOCKS, int BLOCK_M, int K_BLOCKS, int M, int... WIDER>
__device__ __forceinline__ void narrowest_mainloop(float (&acc)[N_BLOCKS][BLOCK_M / 2], Pipeline& pipeline, int rows,
                                                   int k, const int (&width)[N_BLOCKS], int warpgroup) {
    if constexpr (sizeof...(WIDER) > 0) {
        if (rows > M) {
            return narrowest_mainloop<WARPGROUPS, N_BLOCKS, BLOCK_M, K_BLOCKS, WIDER...>(acc, pipeline, rows, k, width,
                                                                                         warpgroup);
        }
    }
    mainloop<WARPGROUPS, N_BLOCKS, M, BLOCK_M, K_BLOCKS>(acc, pipeline, k, width, warpgroup, padded_rows(rows) * 128);
}

template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void consume(const GemmArgs& args, Pipeline& pipeline, int total, int n_tiles) {
    const int warp = threadIdx.x / 32, tiles16 = args.n / 16;
    float acc[N_BLOCKS][BLOCK_M / 2];
    for (int i_tile = blockIdx.x; i_tile < total; i_tile += gridDim.x) {
        const int index = i_tile / n_tiles, first = ((i_tile - index * n_tiles) * WARPGROUPS + warp / 4) * N_BLOCKS;
        const WorkTile tile = args.work_tiles[index];
        int width[N_BLOCKS];
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) width[m] = max(1, min(4, tiles16 - 4 * (first + m)));
        narrowest_mainloop<WARPGROUPS, N_BLOCKS, BLOCK_M, K_BLOCKS, WIDTHS..., BLOCK_M>(acc, pipeline, tile.rows,
                                                                                        args.k, width, warp / 4);
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const int tile16 = (first + m) * 4 + warp % 4;
            if (tile16 >= tiles16) break;
            store<PART, BLOCK_M>(args, acc[m], tile, tile16);
        }
    }
}

}  // namespace bf16

// N_BLOCKS blocks of 64 rows of weights for each of WARPGROUPS consumer warpgroups by up to BLOCK_M rows of x, in MMAs
// for BLOCK_M rows or, where that is enough, for one of the smaller WIDTHS.
template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void bf16_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    constexpr int kBlocks = WARPGROUPS * N_BLOCKS;
    static_assert(bf16::Stage<kBlocks, BLOCK_M, K_BLOCKS>::kBytes == STAGE_BYTES);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) {
        init_barriers(args, pipeline, bf16::kProducers<kBlocks>, WARPGROUPS * 4);
        mbarrier_init_fence();
    }
    __syncthreads();
    // For `down`, work tiles were complete before the kernel ahead of it let it start; x was not.
    if (PART != kDown) {
        grid_dependency_wait();
        launch_dependents();
    }
    const int n_blocks = (args.n + 63) / 64, n_tiles = (n_blocks + kBlocks - 1) / kBlocks;
    const int total = *args.num_tiles * n_tiles;

    if (warp >= WARPGROUPS * 4) {
        reg_dealloc<producer_regs(WARPGROUPS)>();
        pipeline.parity = 1;
        const int producer = warp - WARPGROUPS * 4;
        if (lane == 0 && producer < bf16::kProducers<kBlocks>) {
            bf16::produce<kBlocks, BLOCK_M, K_BLOCKS, PART>(args, pipeline, producer, total, n_tiles);
        }
    } else {
        reg_alloc<consumer_regs(WARPGROUPS)>();
        pipeline.parity = 0;
        bf16::consume<PART, WARPGROUPS, N_BLOCKS, K_BLOCKS, BLOCK_M, WIDTHS...>(args, pipeline, total, n_tiles);
    }
}

}  // namespace polymoe
