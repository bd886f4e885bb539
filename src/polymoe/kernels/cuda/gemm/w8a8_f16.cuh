// E4M3 weights and E4M3 rows, both converted to float16.
//
// The tensor cores accumulate E4M3 products with 14 bits. That is not enough here: h is rounded to E4M3 afterwards, and
// values near a tie would go the other way. So both operands become float16, which holds every E4M3 value, and the
// tensor cores accumulate in float32. With scales for 128 x 128 weights and for 128 columns of rows (kBlock128), that
// is 128 columns at a time; each such sum is multiplied by both scales and accumulated. With one scale for a row of
// weights and one for a row of x (kChannel), it is accumulated as it is, and the scales multiply at the end.
// w8a8_mma.cuh has the same sums: neither changes without the other.
//
// One persistent CTA per SM walks over the tiles (a work tile by 256 rows of weights). One producer thread keeps a
// pipeline of weights full; three producer warps gather rows of x, convert them and store them beside the weights; two
// consumer warpgroups convert weights in registers and multiply, and accumulate one block's sums while the next one's
// MMAs run. Of 16 columns, a lane has four neighbours of weights (e4m3.cuh), so x is stored in that order, too.
//
// A row of x is its codes and behind them its scales (w8::row_bytes). The epilogue of `gate_up` writes h in the same
// form: 128 columns of it are 256 rows of weights, gate and up interleaved, which is a CTA's tile; its warps exchange
// row maxima. With kChannel it writes h in float32.
#pragma once
#include "../dequant/e4m3.cuh"
#include "../epilogue/bf16.cuh"
#include "../epilogue/e4m3_rows.cuh"
#include "../epilogue/f32_rows.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "schedule.cuh"
#include "widths.cuh"

namespace polymoe {
namespace w8a8_f16 {

using namespace w8;

constexpr int kXProducers = 3;  // warps that gather x

// 128 columns of the tile's weights, of x in float16 in two tiles of 64 columns, and the scales.
template <int BLOCK_M>
struct Stage : polymoe::Stage<kTileBytes, BLOCK_M * 256, BLOCK_M * kRowScaleBytes> {
    static constexpr int kHalf = BLOCK_M * 128;
};

// All of K for the blocks of this warpgroup and M of the work tile's rows.
template <Scales SCALES, int M, int BLOCK_M, int PART>
struct Mainloop {
    using S = Stage<BLOCK_M>;
    // As many as registers have room for beside the accumulators.
    static constexpr int kSums = M + BLOCK_M <= 144 || SCALES == kChannel ? kNBlocks : 1;
    float (&acc)[kNBlocks][BLOCK_M / 2];
    Pipeline& pipeline;
    uint32_t lane_weights, lane_scales;
    float sums[kSums][M / 2];
    uint32_t words[4][4];
    uint32_t a[2][2][4];  // two sets alternate: MMAs read one while the other is written

    __device__ __forceinline__ Mainloop(float (&acc)[kNBlocks][BLOCK_M / 2], Pipeline& pipeline)
        : acc(acc), pipeline(pipeline) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
        lane_weights = opaque(warpgroup * kNBlocks * kBlockBytes + warp % 4 * kTile16Bytes + lane_piece());
        lane_scales = opaque(S::kScales + lane % 4 * (SCALES == kChannel ? 8 : 16) +
                             (SCALES == kBlock128 && PART == kDown ? warpgroup * 8 : 0));
    }

    // The codes of a block, in four parts of 32 columns.
    __device__ __forceinline__ void load(uint32_t stage, int m) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            ldmatrix_x4(words[part], ((stage + lane_weights) ^ part * kPartBytes) + m * kBlockBytes);
        }
    }

    __device__ __forceinline__ void convert(int part) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t& to = a[part % 2][i / 4][i % 4];
            const uint32_t codes = words[part][i / 4 * 2 + i % 2];
            to = i % 4 < 2 ? e4m3x2_to_f16x2_low(codes) : e4m3x2_to_f16x2_high(codes);
            materialize(to);
        }
    }

    __device__ __forceinline__ void mma(uint32_t stage, int m, int part) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint64_t x = make_smem_desc_units(smem_desc_units(stage) + (S::kX + part / 2 * S::kHalf) / 16 +
                                                    part % 2 * 4 + step * 2);
            if (part == 0 && step == 0) {
                WgmmaRS<M>::set_f16(sums[m % kSums], a[part % 2][step], x);
            } else {
                WgmmaRS<M>::add_f16(sums[m % kSums], a[part % 2][step], x);
            }
        }
        wgmma_commit();
    }

    // The sums of a block, with kBlock128 times the stage's scales.
    __device__ __forceinline__ void accumulate(uint32_t stage, int m) {
        const float* from = sums[m % kSums];
        if constexpr (SCALES == kChannel) {
#pragma unroll
            for (int i = 0; i < M / 2; ++i) acc[m][i] += from[i];
        } else {
#pragma unroll
            for (int n = 0; n < M / 8; ++n) {
                float scales[4];
                if (PART == kDown) {
                    const uint2 v = ld_shared_v2(stage + lane_scales + n * 64);
                    scales[0] = scales[2] = __uint_as_float(v.x), scales[1] = scales[3] = __uint_as_float(v.y);
                } else {
                    const uint4 v = ld_shared_v4(stage + lane_scales + n * 64);
                    scales[0] = __uint_as_float(v.x), scales[1] = __uint_as_float(v.y);
                    scales[2] = __uint_as_float(v.z), scales[3] = __uint_as_float(v.w);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][4 * n + i] = fmaf(from[4 * n + i], scales[i], acc[m][4 * n + i]);
            }
        }
    }

    // All columns' sums times the scales, of which those of rows of x are in any of the stages.
    __device__ __forceinline__ void scale(uint32_t stage, const ChannelScales<kNBlocks>& channels) {
#pragma unroll
        for (int n = 0; n < M / 8; ++n) {
            const uint2 v = ld_shared_v2(stage + lane_scales + n * 32);
            const float rows[2] = {__uint_as_float(v.x), __uint_as_float(v.y)};
#pragma unroll
            for (int m = 0; m < kNBlocks; ++m) {
                float* sum = &acc[m][4 * n];
#pragma unroll
                for (int i = 0; i < 2; ++i) {  // rounded before biases are added, as in w8a8_mma.cuh
                    sum[i] = __fmul_rn(sum[i], rows[i] * channels.low[m]);
                    sum[2 + i] = __fmul_rn(sum[2 + i], rows[i] * channels.high[m]);
                }
            }
        }
    }

    __device__ __forceinline__ void run(int k_blocks, const ChannelScales<kNBlocks>* channels) {
        clear<M / 2>(acc);
        uint32_t stage = pipeline.wait_full();
        load(stage, 0);
        convert(0);
        for (int left = k_blocks; left > 0; --left) {
#pragma unroll
            for (int m = 0; m < kNBlocks; ++m) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    mma(stage, m, part);
                    wgmma_wait<1>();  // the group before is done
                    if (kSums > 1 && part == 0 && m > 0) accumulate(stage, m - 1);
                    if (part < 3) {
                        convert(part + 1);
                    } else if (m + 1 < kNBlocks) {
                        load(stage, m + 1);
                        convert(0);
                        if (kSums == 1) {
                            wgmma_wait<0>();
                            accumulate(stage, m);
                        }
                    }
                }
            }
            wgmma_wait<0>();
            accumulate(stage, kNBlocks - 1);
            if (SCALES == kChannel && left == 1) scale(stage, *channels);
            mbarrier_arrive(pipeline.empty_barrier());
            pipeline.advance();
            if (left > 1) {
                stage = pipeline.wait_full();
                load(stage, 0);
                convert(0);
            }
        }
    }
};

template <Scales SCALES, int PART, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void consume(const GemmArgs& args, Pipeline& pipeline, RowMaxima<BLOCK_M>& maxima, int total,
                                        int n_tiles) {
    const int warp = threadIdx.x / 32, n_blocks = args.n / 64;
    float acc[kNBlocks][BLOCK_M / 2];
    for (int i_tile = blockIdx.x; i_tile < total; i_tile += gridDim.x) {
        const int index = i_tile / n_tiles, n_tile = i_tile - index * n_tiles;
        WorkTile tile = args.work_tiles[index];
        tile.rows = warp_uniform(tile.rows);
        const auto multiply = [&](const ChannelScales<kNBlocks>* channels) {
            with_narrowest<WIDTHS..., BLOCK_M>(tile.rows, [&](auto width) {
                Mainloop<SCALES, decltype(width)::value, BLOCK_M, PART>(acc, pipeline)
                    .run(args.k / kE4m3BlockK, channels);
            });
        };
        if constexpr (SCALES == kChannel) {
            const ChannelScales<kNBlocks> channels(args, tile.expert, (n_tile * kWarpgroups + warp / 4) * kNBlocks);
            multiply(&channels);
        } else {
            multiply(nullptr);
        }
        if constexpr (PART != kDown && SCALES == kChannel) {
            store_h_f32<PART, kNBlocks, BLOCK_M>(args, acc, tile, n_tile * kWarpgroups * kNBlocks);
        } else if constexpr (PART == kGateUp) {
            store_h_e4m3_rows<BLOCK_M>(args, acc, tile, n_tile, maxima);
        } else {
#pragma unroll
            for (int m = 0; m < kNBlocks; ++m) {
                const int n_block = (n_tile * kWarpgroups + warp / 4) * kNBlocks + m;
                if (n_block < n_blocks) store_y<BLOCK_M, 1>(args, acc[m], tile, n_block);
            }
        }
    }
}

// One thread: all weights of the tiles, 128 columns at a time.
template <int BLOCK_M>
__device__ __forceinline__ void produce_weights(const GemmArgs& args, Pipeline& pipeline, int total, int n_tiles) {
    for (int i_tile = blockIdx.x; i_tile < total; i_tile += gridDim.x) {
        const int index = i_tile / n_tiles, n_tile = i_tile - index * n_tiles;
        const uint32_t bytes = min(kTileBytes, args.n * 128 - n_tile * kTileBytes);
        const uint8_t* codes = args.codes + args.work_tiles[index].expert * args.codes_stride + 256LL * n_tile * args.k;
        for (int k_block = 0; k_block < args.k / kE4m3BlockK; ++k_block) {
            const uint32_t barrier = pipeline.full_barrier();
            pipeline.wait_empty();
            mbarrier_arrive_expect_tx(barrier, bytes);
            copy_weights<BLOCK_M>(pipeline.address(), codes, bytes, barrier);
            codes += bytes;
            pipeline.advance();
        }
    }
}

// Three warps: x of the tiles, 128 columns at a time, all together or, for few rows, a stage each in rotation. Eight
// lanes have a row, 16 columns each, and the next row kAtOnce further on; each of them has the scale of one of their
// rows. What goes to the next stage is on its way to registers while that stage is not empty yet.
template <Scales SCALES, int BLOCK_M, int PART>
struct XProducer {
    using S = Stage<BLOCK_M>;
    static constexpr uint32_t kNone = 0xFFFFFFFFu;
    static constexpr int kTogether = BLOCK_M <= 32 ? 1 : kXProducers, kRotation = kXProducers / kTogether;
    static constexpr int kAtOnce = kTogether * 4, kTimes = (BLOCK_M + kAtOnce - 1) / kAtOnce;
    static_assert(kTimes <= 8 && kAtOnce % 8 == 4);
    const GemmArgs& args;
    Pipeline& pipeline;
    const int first_stage, first, piece;  // of the rotation; of the work tile's rows; of a row's 128 columns
    const uint32_t units;                 // of 16 bytes in a row
    const uint32_t place;                 // of the first row's piece in a stage
    uint32_t from[kTimes];                // the work tile's rows, in units; or kNone
    uint32_t scale_from;
    WeightScales weight_scales;
    uint4 codes[kTimes];
    float scale, weights[2];

    __device__ __forceinline__ XProducer(const GemmArgs& args, Pipeline& pipeline, int thread)
        : args(args),
          pipeline(pipeline),
          first_stage(thread / (kTogether * 32)),
          first(thread / 8 % kAtOnce),
          piece(thread % 8),
          units(row_bytes(args.k) / 16),
          place(opaque(S::kX + piece / 4 * S::kHalf + first * 128 + ((piece % 4 * 2) ^ (first % 8)) * 16)) {}

    __device__ __forceinline__ uint32_t source(WorkTile tile, int row) const {
        if (row >= tile.rows) return kNone;
        if (SCALES == kChannel) return x_row<PART>(args, tile.row + row) * units;
        return (PART == kDown ? tile.row + row : args.permuted_to_expanded[tile.row + row] / args.top_k) * units;
    }

    __device__ __forceinline__ void find(int i_tile, int n_tiles) {
        const int index = i_tile / n_tiles;
        const WorkTile tile = args.work_tiles[index];
        if (SCALES == kBlock128) weight_scales = WeightScales::of<PART>(args, tile.expert, i_tile - index * n_tiles);
#pragma unroll
        for (int i = 0; i < kTimes; ++i) from[i] = source(tile, first + i * kAtOnce);
        scale_from = source(tile, first + piece * kAtOnce);
        if (SCALES == kChannel && scale_from != kNone) {
            scale = row_scale<PART>(args, scale_from, tile.row + first + piece * kAtOnce);
        }
    }

    __device__ __forceinline__ void fetch(int k_block, int i) {
        const uint4* x = reinterpret_cast<const uint4*>(args.x) + k_block * 8 + piece;
        codes[i] = ld_global_v4_if(from[i] != kNone, x + opaque(from[i]));
    }

    __device__ __forceinline__ void fetch_scales(int k_block) {
        if (SCALES == kChannel || scale_from == kNone) return;
        scale =
            reinterpret_cast<const float*>(reinterpret_cast<const uint4*>(args.x) + scale_from + args.k / 16)[k_block];
        weights[0] = weight_scales.first[k_block], weights[1] = weight_scales.second[k_block];
    }

    // Stores what is in registers to the stage, and fetches the tile's block number `next`, unless that is 0.
    __device__ __forceinline__ void store(int next) {
        const uint32_t stage = pipeline.address();
        if (SCALES == kChannel) {
            if (scale_from != kNone) {
                st_shared(stage + S::kScales + (first + piece * kAtOnce) * 4, __float_as_uint(scale));
            }
        } else if (scale_from != kNone) {
            const int row = first + piece * kAtOnce;
            const uint32_t to = stage + S::kScales + row / 2 * 16 + row % 2 * 4;
            st_shared(to, __float_as_uint(scale * weights[0]));
            st_shared(to + 8, __float_as_uint(scale * weights[1]));
        }
        if (next) fetch_scales(next);
#pragma unroll
        for (int i = 0; i < kTimes; ++i) {
            if (from[i] == kNone) continue;
            // kAtOnce rows further on, swizzling flips the third bit.
            const uint32_t to = ((stage + place) ^ (i % 2 * 64)) + i * kAtOnce * 128;
            const uint4 v = codes[i];
            st_shared_v4(to, make_uint4(e4m3x2_to_f16x2_low(v.x), e4m3x2_to_f16x2_low(v.y), e4m3x2_to_f16x2_low(v.z),
                                        e4m3x2_to_f16x2_low(v.w)));
            st_shared_v4(to ^ 16, make_uint4(e4m3x2_to_f16x2_high(v.x), e4m3x2_to_f16x2_high(v.y),
                                             e4m3x2_to_f16x2_high(v.z), e4m3x2_to_f16x2_high(v.w)));
            if (next) fetch(next, i);
        }
        fence_proxy_async();
        mbarrier_arrive(pipeline.full_barrier());
    }

    __device__ __forceinline__ void run(int total, int n_tiles) {
        const int k_blocks = args.k / kE4m3BlockK;
        for (int i = 0; i < first_stage; ++i) pipeline.advance();
        int k_block = first_stage;
        for (int i_tile = blockIdx.x; i_tile < total; i_tile += gridDim.x, k_block -= k_blocks) {
            if (k_block >= k_blocks) continue;
            find(i_tile, n_tiles);
            fetch_scales(k_block);
#pragma unroll
            for (int i = 0; i < kTimes; ++i) fetch(k_block, i);
#pragma unroll 1
            for (; k_block < k_blocks; k_block += kRotation) {
                pipeline.wait_empty();
                store(k_block + kRotation < k_blocks ? k_block + kRotation : 0);
#pragma unroll
                for (int i = 0; i < kRotation; ++i) pipeline.advance();
            }
        }
    }
};

}  // namespace w8a8_f16

// 256 rows of weights by up to BLOCK_M rows of x, in MMAs for BLOCK_M rows or, where that is enough, for one of the
// smaller WIDTHS.
template <Scales SCALES, int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M,
          int... WIDTHS>
__device__ __forceinline__ void w8a8_f16_gemm(const GemmArgs& args) {
    using namespace w8a8_f16;
    static_assert(WARPGROUPS == kWarpgroups && N_BLOCKS == kNBlocks && K_BLOCKS * 64 == kE4m3BlockK);
    static_assert(w8a8_f16::Stage<BLOCK_M>::kBytes == STAGE_BYTES);
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ __align__(16) RowMaxima<BLOCK_M> maxima;
    const int warp = warp_uniform(threadIdx.x / 32);
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0)
        init_barriers(args, pipeline, 1 + 32 * XProducer<SCALES, BLOCK_M, PART>::kTogether, kWarps * 32);
    __syncthreads();
    begin_launch<PART>();
    const int n_tiles = (args.n + 255) / 256, total = warp_uniform(args.tiles->work_tiles) * n_tiles;

    if (warp >= kWarps) {
        reg_dealloc<88>();
        pipeline.parity = 1;
        if (warp == kWarps) {
            if (threadIdx.x % 32 == 0) produce_weights<BLOCK_M>(args, pipeline, total, n_tiles);
        } else {
            begin_x<PART>();
            XProducer<SCALES, BLOCK_M, PART>(args, pipeline, threadIdx.x - (kWarps + 1) * 32).run(total, n_tiles);
        }
    } else {
        reg_alloc<208>();
        pipeline.parity = 0;
        consume<SCALES, PART, BLOCK_M, WIDTHS...>(args, pipeline, maxima, total, n_tiles);
    }
}

}  // namespace polymoe
