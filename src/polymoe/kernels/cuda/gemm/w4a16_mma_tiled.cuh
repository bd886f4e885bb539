// Weights of 4 or 8 bits and bfloat16 rows by mma.sync, for enough rows an expert that each decoded weight is used many
// times, on GPUs that have no wgmma. Weights are the left operand: each consumer warp decodes 32 rows of them once into
// registers and multiplies them with all rows of the work tile.
//
// x, h and y are as for w4a16_wgmma, and so are stages and the epilogue. Every thread has 168 registers, without
// setmaxnreg, which SM120's compiler accepts and makes no use of.
#pragma once
#include "../dequant/scales.cuh"
#include "../epilogue/bf16.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/mma.cuh"
#include "w4_producer.cuh"
#include "widths.cuh"

namespace polymoe {

// All of K, for this warp's two tiles of 16 rows of weights and the work tile's rows.
template <class F, int WARPGROUPS, int BLOCK_M>
struct W4a16MmaMainloop {
    using S = W4Stage<F, Bf16Tiles, WARPGROUPS * 2, BLOCK_M, 1>;
    static constexpr int kBlocks = kStepWords<F>, kSteps = 4 / kBlocks;  // blocks of a stage; 16 columns of a block
    float (&acc)[2][BLOCK_M / 8][4];
    Pipeline& pipeline;
    int k;
    uint32_t lane_codes, lane_scales;  // in a stage
    uint32_t lane_x;                   // 8 of the first 16 columns of one of 16 rows; of the next columns at ^ 32
    uint4 words[2];
    uint32_t scale_words[2][kScaleWords<F>];

    __device__ __forceinline__ W4a16MmaMainloop(float (&acc)[2][BLOCK_M / 8][4], const GemmArgs& args,
                                                Pipeline& pipeline)
        : acc(acc), pipeline(pipeline), k(args.k) {
        const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2, block = threadIdx.x / 64;
        lane_codes = opaque(S::kCodes + block * S::kBlockCodes + half * 1024 + lane * 16);
        lane_scales = opaque(S::kScales + block * S::kBlockScales + (lane / 4 * 4 + half * 2) * kTileScaleBytes<F>);
        lane_x = opaque((lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16);
    }

    // Codes and scales of a block. Where there are no such rows of weights, these are other bytes.
    __device__ __forceinline__ void load(uint32_t stage, int block) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            words[tile] = ld_shared_v4(stage + lane_codes + block * 2048 + tile * 512);
        }
        load_scale_words<F>(scale_words, stage + lane_scales + block * F::kScaleBytes);
    }

    // 16 columns of x, for 16 * PAIRS of its rows. Rows beyond the work tile's are other bytes, for sums that nobody
    // reads.
    template <int PAIRS>
    __device__ __forceinline__ void mma_step(const uint32_t (&a)[2][4], uint32_t x) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            uint32_t b[4];
            ldmatrix_x4(b, x + pair * 2048);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    mma_m16n8k16(acc[tile][pair * 2 + i], a[tile], b[2 * i], b[2 * i + 1]);
                }
            }
        }
    }

    // All whole stages. The next block's weights are loaded ahead of the last MMAs of each.
    template <int N>
    __device__ __forceinline__ void mma_stages(int stages) {
        uint32_t stage = pipeline.wait_full();
        load(stage, 0);
#pragma unroll 1
        for (; stages > 0; --stages) {
            const uint32_t empty = pipeline.empty_barrier(), x = stage + lane_x;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const typename F::Scales scales[2] = {F::scales(scale_words[0]), F::scales(scale_words[1])};
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    uint32_t a[2][4];
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        const uint32_t word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
                        dequantize<F>(a[tile], word + step * kBlocks, F::scale(scales[tile], step));
                    }
                    if (step == kSteps - 1) {
                        if (block < kBlocks - 1) {
                            load(stage, block + 1);
                        } else {
                            pipeline.advance();
                            if (stages > 1) {
                                stage = pipeline.wait_full();
                                load(stage, 0);
                            }
                        }
                    }
                    mma_step<N / 16>(a, x ^ (block * kSteps + step) * 32);
                }
            }
            mbarrier_arrive(empty);
        }
    }

    // The k_tail, fewer than 64 columns, in steps of 16.
    __device__ __forceinline__ void mma_k_tail(uint32_t stage, int steps, int rows) {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 2 * 2;  // of the tiles of a block of 64 rows
        const uint32_t codes = stage + lane_codes - first * 512 - lane * (16 - 4 * kBlocks);
        for (int step = 0; step < steps; ++step) {
            uint32_t a[2][4];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int block = kBlocks == 1 ? 0 : step / kSteps;
                const typename F::Scales scales =
                    load_scales<F>(stage + lane_scales + block * F::kScaleBytes + tile * kTileScaleBytes<F>);
                const typename F::Scale low = step == 0 ? F::scale(scales, 0) : F::scale(scales, 1);
                // In a whole block a lane's words are together; in the last, of fewer columns, they are apart.
                const int of_block = steps - block * kSteps, inner = step - block * kSteps;
                const uint32_t from = kBlocks > 1 && of_block >= kSteps
                                          ? stage + lane_codes + tile * 512 + inner * 4 * kBlocks
                                          : codes + ((first + tile) * of_block + inner) * 128 * kBlocks;
                uint32_t word[kBlocks];
#pragma unroll
                for (int w = 0; w < kBlocks; ++w) word[w] = ld_shared(from + block * 2048 + w * 4);
                dequantize<F>(a[tile], word, step < 2 ? low : F::scale(scales, 2));
            }
            const uint32_t x = stage + lane_x;
#pragma unroll
            for (int m = 0; m < BLOCK_M / 8; m += 2) {
                if (m * 8 >= rows) break;
                uint32_t b[4];
                ldmatrix_x4(b, (x ^ step * 32) + m * 1024);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        mma_m16n8k16(acc[tile][m + i], a[tile], b[2 * i], b[2 * i + 1]);
                    }
                }
            }
        }
        mbarrier_arrive(pipeline.empty_barrier());
        pipeline.advance();
    }

    template <int... WIDTHS>
    __device__ __forceinline__ void run(int rows) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int m = 0; m < BLOCK_M / 8; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[tile][m][i] = 0.0f;
            }
        }
        if (k >= 64) {
            with_narrowest<WIDTHS..., BLOCK_M>(rows, [&](auto width) { mma_stages<decltype(width)::value>(k / 64); });
        }
        if (k % 64) mma_k_tail(pipeline.wait_full(), k % 64 / 16, rows);
    }
};

// One thread of each of four warps, each with a block of 64 rows of weights; one of them copies x. `total` is the
// number of all tiles.
template <class F, class S, int PART>
__device__ __forceinline__ void produce_tiles(const GemmArgs& args, Pipeline& pipeline, int producer, int total,
                                              int n_tiles) {
    const int tiles16 = args.n / 16, k_blocks = (args.k + 63) / 64, row_scales = scale_blocks<F>(args.k);
    WaitForX wait_for_x{PART != kDown};
    for (int i_tile = blockIdx.x; i_tile < total; i_tile += gridDim.x) {
        const int index = i_tile / n_tiles, block = (i_tile - index * n_tiles) * 4 + producer;
        const WorkTile tile = args.work_tiles[index];
        const int padded = padded_rows(tile.rows);
        const int width = max(0, min(4, tiles16 - 4 * block));  // tiles of 16 rows
        const uint8_t* codes =
            args.codes + tile.expert * args.codes_stride + static_cast<long long>(kColumnBytes<F>) * block * args.k;
        const uint8_t* scales = args.scales + tile.expert * args.scales_stride +
                                static_cast<long long>(block) * row_scales * F::kScaleBytes;
        const uint8_t* x =
            reinterpret_cast<const uint8_t*>(args.x) + static_cast<long long>(tile.padded_row) * k_blocks * 128;
        for (int k_block = 0; k_block < k_blocks; ++k_block) {
            const uint32_t barrier = pipeline.full_barrier(), to = pipeline.address();
            const int columns = min(64, args.k - k_block * 64), x_bytes = producer == 0 ? padded * 128 : 0;
            const int blocks = kStepWords<F> == 1 ? 1 : (columns + kBlockColumns<F> - 1) / kBlockColumns<F>;
            const int column_bytes = width * (kColumnBytes<F> / 4), scale_bytes = blocks * F::kScaleBytes;
            pipeline.wait_empty();
            mbarrier_arrive_expect_tx(barrier, x_bytes + (width ? column_bytes * columns + scale_bytes : 0));
            if (width) {
                for (int b = 0; b < blocks; ++b) {  // as far apart as if they had all their rows
                    bulk_copy_g2s(to + S::kCodes + producer * S::kBlockCodes + b * 2048, codes + b * width * 512,
                                  column_bytes * min(kBlockColumns<F>, columns - b * kBlockColumns<F>), barrier);
                }
                // Where two blocks share scales, the second stage gets the same scales again.
                bulk_copy_g2s(to + S::kScales + producer * S::kBlockScales,
                              scales + k_block * kStepWords<F> / F::kScaleBlocks * F::kScaleBytes, scale_bytes,
                              barrier);
                codes += blocks * width * 512;
            }
            if (x_bytes) {
                wait_for_x();
                bulk_copy_g2s(to, x, x_bytes, barrier);
                x += x_bytes;
            }
            pipeline.advance();
        }
    }
    wait_for_x.end();
}

// 128 rows of weights for each of WARPGROUPS consumer warpgroups by up to BLOCK_M rows of x, multiplied by as many or,
// where that is enough, by one of the smaller WIDTHS.
template <class F, int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void w4a16_mma_tiled_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    constexpr int kBlocks = WARPGROUPS * N_BLOCKS;
    static_assert(N_BLOCKS == 2 && K_BLOCKS == 1 && kBlocks == 4);
    static_assert(W4Stage<F, Bf16Tiles, kBlocks, BLOCK_M, K_BLOCKS>::kBytes == STAGE_BYTES);
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    // every lane arrives for its own reads
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, 4, WARPGROUPS * 128);
    __syncthreads();
    begin_launch<PART>();
    const int tiles16 = args.n / 16, n_blocks = (tiles16 + 3) / 4, n_tiles = (n_blocks + kBlocks - 1) / kBlocks;
    const int total = warp_uniform(args.tiles->work_tiles) * n_tiles;

    if (warp >= WARPGROUPS * 4) {
        pipeline.parity = 1;
        if (lane == 0) {
            produce_tiles<F, W4Stage<F, Bf16Tiles, kBlocks, BLOCK_M, K_BLOCKS>, PART>(
                args, pipeline, warp - WARPGROUPS * 4, total, n_tiles);
        }
    } else {
        pipeline.parity = 0;
        float acc[2][BLOCK_M / 8][4];
        for (int i_tile = blockIdx.x; i_tile < total; i_tile += gridDim.x) {
            const int index = i_tile / n_tiles, n_block = (i_tile - index * n_tiles) * kBlocks;
            WorkTile tile = uniform_tile(args.work_tiles[index]);
            W4a16MmaMainloop<F, WARPGROUPS, BLOCK_M>(acc, args, pipeline).template run<WIDTHS...>(tile.rows);
            // Read anew: registers have no room for it beside the main loop.
            if (PART != kDown) tile.padded_row = warp_uniform(args.work_tiles[index].padded_row);
            const ExpertScales<F, PART> scales(args, tile.expert);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int tile16 = n_block * 4 + warp * 2 + i;
                if (tile16 >= tiles16) break;
                const WeightRows<PART, kHalves> rows(args, tile.expert, tile16, scales.low, scales.high);
                for_activation<PART>(args, [&](auto evaluates) {
                    store_bf16<BLOCK_M, 1, decltype(evaluates)::how, PART != kDown>(args, tile, rows, acc[i][0],
                                                                                    tile16);
                });
            }
        }
    }
}

}  // namespace polymoe
