// Weights of 4 bits, dequantized to E4M3 in registers, and E4M3 rows by wgmma, where one scale is that of a whole row
// of x: no scale of x comes between the MMAs. Weights are the left operand.
//
// The tensor cores accumulate E4M3 products with 14 bits, so that what is lost grows with the columns that they add up.
// After kPromoted columns, or where K ends, such sums are added to accumulators in float32. docs/performance/cuda.md
// says what that leaves of the error. With INT4 weights each sum is that of a group, times its scale. With fast
// accumulation the tensor cores add up all of K, and the registers of such sums hold more rows of weights.
//
// x comes in permuted tiles, as quantize_row_tiles writes them: those of epilogue/e4m3_tiles.cuh, with a row's scale
// where that of its first 128 columns would be. h is in float32, by permuted row; y is by permuted row.
#pragma once
#include "../dequant/fp4_to_e4m3.cuh"
#include "../dequant/int4_to_e4m3.cuh"
#include "../epilogue/bf16.cuh"
#include "../epilogue/f32_rows.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "w4_producer.cuh"
#include "widths.cuh"

namespace polymoe {

// Columns that the tensor cores add up.
constexpr int kPromoted = 256;

template <bool VALUE>
struct Bool {
    static constexpr bool value = VALUE;
};

// How a format's codes become the MMA's left operand: what a lane keeps of 64 columns of a block, and the operand's
// four registers for 32 of them. A format's scales are in its operand, or multiply sums of kColumns columns; what is
// left of them multiplies a row's sums.
template <class F>
struct E4m3Operand;

// MXFP4: magnitudes are looked up (dequant/fp4_to_e4m3.cuh).
template <>
struct E4m3Operand<Mxfp4ToE4m3> {
    static constexpr int kColumns = kPromoted, kScratchBytes = 8 * kLutSteps;
    struct SumScales {
        __device__ __forceinline__ float add(float acc, float sum, int) const { return acc + sum; }
    };
    uint32_t codes, scales, lut;  // of the lane, in a stage; the table
    uint32_t words[4], offsets;

    static __device__ __forceinline__ void fill(uint8_t* scratch) {
        if (threadIdx.x < kLutSteps) reinterpret_cast<uint64_t*>(scratch)[threadIdx.x] = e2m1_lut(threadIdx.x);
    }

    // Codes and scales begin at `codes` and `scales` of a stage.
    __device__ __forceinline__ E4m3Operand(uint32_t codes, uint32_t scales, uint32_t scratch)
        : codes(opaque(codes + threadIdx.x / 32 % 4 * 512 + threadIdx.x % 32 * 16)),
          scales(opaque(scales + (threadIdx.x % 32 / 4 * 4 + threadIdx.x / 32 % 4) * 4)),
          lut(scratch) {}

    // 64 columns of a block whose codes and scales lie so many bytes behind the first. Where a block has no such tile,
    // these are other bytes, but offsets inside the table.
    template <int HALF>
    __device__ __forceinline__ void load(uint32_t stage, int codes_from, int scales_from) {
        const uint4 w = ld_shared_v4(stage + codes + codes_from + HALF * 2048);
        words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
        offsets = ld_shared(stage + scales + scales_from + HALF * Mxfp4ToE4m3::kScaleBytes) & 0x78787878u;
    }

    __device__ __forceinline__ SumScales sum_scales() const { return {}; }

    template <int HALF>
    __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) const {
        const uint2 low = ld_shared_v2(lut + extract_byte<HALF * 2>(offsets));  // row g
        const uint2 high = ld_shared_v2(lut + extract_byte<HALF * 2 + 1>(offsets));
        dequant_e2m1_to_e4m3(a[0], a[2], words[HALF * 2], low);
        dequant_e2m1_to_e4m3(a[1], a[3], words[HALF * 2 + 1], high);
#pragma unroll
        for (int i = 0; i < 4; ++i) materialize(a[i]);
    }

    // What the sums of rows g and g + 8 of a tile are multiplied by. The rows' largest scales come after all offsets.
    static __device__ __forceinline__ float row_scale(const GemmArgs& args, const float* expert_scale, int expert,
                                                      int row) {
        const uint8_t* row_max =
            args.scales + expert * args.scales_stride + (args.n + 63) / 64 * ((args.k + 63) / 64) * 128LL;
        return Mxfp4ToE4m3::row_scale(row_max + row, expert_scale, expert);
    }
};

// The same with fast accumulation: no columns after which sums are promoted.
template <class F>
struct FastAccumulation : F {};

template <class F>
struct E4m3Operand<FastAccumulation<F>> : E4m3Operand<F> {
    static constexpr int kColumns = 0;
    using E4m3Operand<F>::E4m3Operand;
};

// INT4 by groups of 128 columns, a stage: computed, or with zero points looked up (dequant/int4_to_e4m3.cuh).
template <bool ZERO_POINTS>
struct E4m3Operand<Int4ToE4m3<ZERO_POINTS>> {
    static constexpr int kColumns = 128, kScratchBytes = ZERO_POINTS ? 256 : 0;
    // Of rows g and g + 8.
    struct SumScales {
        float low, high;
        __device__ __forceinline__ float add(float acc, float sum, int i) const {
            return fmaf(sum, i % 4 < 2 ? low : high, acc);
        }
    };
    uint32_t codes, scales, lut;
    uint32_t words[4];
    uint2 group;  // scales and zero points of the 128 columns
    uint4 luts[2];

    static __device__ __forceinline__ void fill(uint8_t* scratch) {
        if (ZERO_POINTS && threadIdx.x < 64) {
            reinterpret_cast<uint32_t*>(scratch)[threadIdx.x] = int4_lut(threadIdx.x / 4, threadIdx.x % 4);
        }
    }

    __device__ __forceinline__ E4m3Operand(uint32_t codes, uint32_t scales, uint32_t scratch)
        : codes(opaque(codes + threadIdx.x / 32 % 4 * 512 + threadIdx.x % 32 * 16)),
          scales(opaque(scales + threadIdx.x / 32 % 4 * 64 + threadIdx.x % 32 / 4 * 8)),
          lut(scratch) {}

    template <int HALF>
    __device__ __forceinline__ void load(uint32_t stage, int codes_from, int scales_from) {
        const uint4 w = ld_shared_v4(stage + codes + codes_from + HALF * 2048);
        words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
        if constexpr (HALF == 0) group = ld_shared_v2(stage + scales + scales_from);
        if constexpr (HALF == 0 && ZERO_POINTS) {
            luts[0] = ld_shared_v4(lut + group.x % 16 * 16), luts[1] = ld_shared_v4(lut + group.y % 16 * 16);
        }
    }

    // Of the 128 columns whose first half was loaded last.
    __device__ __forceinline__ SumScales sum_scales() const {
        constexpr uint32_t kMask = ZERO_POINTS ? ~15u : ~0u;
        return {__uint_as_float(group.x & kMask), __uint_as_float(group.y & kMask)};
    }

    template <int HALF>
    __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (ZERO_POINTS) {
                lookup_int4_in_e4m3(a[i], a[i + 2], words[HALF * 2 + i], luts[i]);
            } else {
                dequant_int4_to_e4m3(a[i], a[i + 2], words[HALF * 2 + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) materialize(a[i]);
    }

    // Computed bytes are numbers times 2^-9.
    static __device__ __forceinline__ float row_scale(const GemmArgs&, const float* expert_scale, int expert, int) {
        return (ZERO_POINTS ? 1.0f : 512.0f) * (expert_scale ? expert_scale[expert] : 1.0f);
    }
};

// All of K for N_BLOCKS blocks of 64 rows of this warpgroup and the work tile's rows, a stage of 128 columns after the
// other. While the MMAs of 64 columns run, the next 64 are dequantized. A block takes a turn of kColumns columns, so
// that one at a time has sums beside its accumulators; the stages of a turn stay until the last block had its own. With
// fast accumulation there are no such sums: all blocks take each stage in turn.
template <class F, int WARPGROUPS, int N_BLOCKS, int BLOCK_M>
struct W4a8RowsMainloop {
    using S = W4Stage<F, E4m3Tiles, WARPGROUPS * N_BLOCKS, BLOCK_M, 2>;
    static constexpr int kTurn = E4m3Operand<F>::kColumns / kE4m3BlockK;  // stages
    float (&acc)[N_BLOCKS][BLOCK_M / 2];
    Pipeline& pipeline;
    E4m3Operand<F> operand;
    uint32_t a[2][2][4];

    __device__ __forceinline__ W4a8RowsMainloop(float (&acc)[N_BLOCKS][BLOCK_M / 2], Pipeline& pipeline,
                                                uint32_t scratch)
        : acc(acc),
          pipeline(pipeline),
          operand(S::kCodes + threadIdx.x / 128 * N_BLOCKS * S::kBlockCodes,
                  S::kScales + threadIdx.x / 128 * N_BLOCKS * S::kBlockScales, scratch) {}

    // Half of a stage's columns of block m. Behind the last of K, the second half may be other bytes, which are
    // multiplied by zeros.
    template <int HALF>
    __device__ __forceinline__ void load(uint32_t stage, int m) {
        operand.template load<HALF>(stage, m * S::kBlockCodes, m * S::kBlockScales);
    }

    template <int HALF>
    __device__ __forceinline__ void dequantize() {
        operand.template dequantize<0>(a[HALF][0]);
        operand.template dequantize<1>(a[HALF][1]);
    }

    template <int M, int HALF, bool FRESH>
    __device__ __forceinline__ void mma(float* sum, uint32_t x) {
        wgmma_fence();
        if constexpr (FRESH) {
            WgmmaRS<M>::set_e4m3(sum, a[HALF][0], make_smem_desc_units(x + HALF * 4));
        } else {
            WgmmaRS<M>::add_e4m3(sum, a[HALF][0], make_smem_desc_units(x + HALF * 4));
        }
        WgmmaRS<M>::add_e4m3(sum, a[HALF][1], make_smem_desc_units(x + HALF * 4 + 2));
        wgmma_commit();
    }

    // Once all lanes have read a stage of which no MMA runs.
    __device__ __forceinline__ void release(uint32_t& barrier) const {
        if (barrier && threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
        barrier = 0;
    }

    // A turn of all blocks: `stages` stages, of which the first is full and its first half dequantized for block 0.
    // `more`: another turn follows.
    template <int M>
    __device__ __forceinline__ void turn(int stages, bool more) {
        const Pipeline first = pipeline;
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const bool last = m == N_BLOCKS - 1;
            const auto scales = operand.sum_scales();
            Pipeline at = first;
            uint32_t done = 0;  // the mbarrier of a stage to give back
            float sum[M / 2];
            const auto stage = [&](auto fresh, bool end) {
                const uint32_t here = at.address(), x = smem_desc_units(here), barrier = at.empty_barrier();
                load<1>(here, m);
                mma<M, 0, decltype(fresh)::value>(sum, x);
                wgmma_wait<1>();  // the stage before is done
                if (last) release(done);
                dequantize<1>();
                mma<M, 1, false>(sum, x);
                at.advance();
                // What comes next: another stage, these stages for another block, or the next turn.
                if (end ? last && more : m == 0) at.wait_full();
                const uint32_t next = !end ? at.address() : !last ? first.address() : more ? at.address() : here;
                load<0>(next, end ? (m + 1) % N_BLOCKS : m);
                wgmma_wait<1>();
                dequantize<0>();
                if (last) done = barrier;
            };
            stage(Bool<true>{}, kTurn == 1 || stages == 1);
            if (kTurn > 1) {
                for (int left = stages - 1; left > 0; --left) stage(Bool<false>{}, left == 1);
            }
            wgmma_wait<0>();
            if (last) release(done), pipeline = at;
#pragma unroll
            for (int i = 0; i < M / 2; ++i) {
                materialize(sum[i]);
                acc[m][i] = scales.add(acc[m][i], sum[i], i);
            }
        }
    }

    // A stage of all blocks, added to their accumulators. Its first half is dequantized for block 0. `done`: the
    // mbarrier of the stage before, to give back; then of this one. `more`: another stage follows.
    template <int M>
    __device__ __forceinline__ void add_stage(uint32_t& done, bool more) {
        const uint32_t here = pipeline.address(), x = smem_desc_units(here), barrier = pipeline.empty_barrier();
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const bool last = m == N_BLOCKS - 1;
            load<1>(here, m);
            mma<M, 0, false>(acc[m], x);
            wgmma_wait<1>();  // the MMAs before are done
            if (m == 0) release(done);
            dequantize<1>();
            mma<M, 1, false>(acc[m], x);
            if (last) {
                pipeline.advance();
                if (more) pipeline.wait_full();
            }
            load<0>(last && more ? pipeline.address() : here, (m + 1) % N_BLOCKS);
            wgmma_wait<1>();
            dequantize<0>();
        }
        done = barrier;
    }

    template <int M>
    __device__ __forceinline__ void mma_stages(int stages) {
        load<0>(pipeline.wait_full(), 0);
        dequantize<0>();
        if constexpr (kTurn > 0) {
            for (int left = stages; left > 0; left -= kTurn) turn<M>(min(left, kTurn), left > kTurn);
        } else {
            uint32_t done = 0;
            for (int left = stages; left > 0; --left) add_stage<M>(done, left > 1);
            wgmma_wait<0>();
            release(done);
#pragma unroll
            for (int m = 0; m < N_BLOCKS; ++m) {
#pragma unroll
                for (int i = 0; i < M / 2; ++i) materialize(acc[m][i]);
            }
        }
    }

    template <int... WIDTHS>
    __device__ __forceinline__ void run(int stages, int rows) {
        clear<BLOCK_M / 2>(acc);
        with_narrowest<WIDTHS..., BLOCK_M>(rows, [&](auto width) { mma_stages<decltype(width)::value>(stages); });
    }
};

// A tile's sums times the scales of its rows g and g + 8 of weights and of all rows of x, of which the warp has those
// of rows 2t and 2t + 1 of each 8 at `row_scales`.
template <int BLOCK_M>
__device__ __forceinline__ void scale_sums(float (&acc)[BLOCK_M / 2], uint32_t row_scales, int rows, float low,
                                           float high) {
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
        if (n * 8 >= rows) break;
        const uint2 v = ld_shared_v2(row_scales + n * 32);
        const float scales[2] = {__uint_as_float(v.x), __uint_as_float(v.y)};
#pragma unroll
        for (int i = 0; i < 2; ++i) acc[4 * n + i] *= scales[i] * low, acc[4 * n + 2 + i] *= scales[i] * high;
    }
}

// N_BLOCKS blocks of 64 rows of weights for each of WARPGROUPS consumer warpgroups by up to BLOCK_M rows of x, in MMAs
// for BLOCK_M rows or, where that is enough, for one of the smaller WIDTHS. After the stages come what F needs, and for
// each warp the scales of the work tile's rows.
template <class F, int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void w4a8_rows_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ TileQueue queue;
    constexpr int kBlocks = WARPGROUPS * N_BLOCKS;
    using S = W4Stage<F, E4m3Tiles, kBlocks, BLOCK_M, K_BLOCKS>;
    static_assert(PART != kUp && K_BLOCKS * 64 == kE4m3BlockK && E4m3Operand<F>::kColumns % kE4m3BlockK == 0);
    static_assert(S::kBytes == STAGE_BYTES && BLOCK_M <= 128);
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    const uint32_t skipped = (1024 - smem_address(memory) % 1024) % 1024;
    Pipeline pipeline = make_pipeline(args, smem_address(memory) + skipped, barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, 4, WARPGROUPS * 4, queue);
    uint8_t* scratch = memory + skipped + pipeline.stages * pipeline.stage_bytes;
    E4m3Operand<F>::fill(scratch);
    __syncthreads();
    const LaunchOrder order(args);
    order.begin<kDown>();  // gate and up, too, copy weights ahead of x
    const int tiles16 = args.n / 16, n_tiles = ((tiles16 + 3) / 4 + kBlocks - 1) / kBlocks;
    const int total = order.work_tiles * n_tiles;

    if (warp >= WARPGROUPS * 4) {
        reg_dealloc<producer_regs(WARPGROUPS)>();
        pipeline.parity = 1;
        if (lane == 0) {
            produce_w4<F, E4m3Tiles, kBlocks, BLOCK_M, K_BLOCKS, kDown>(args, pipeline, queue, warp - WARPGROUPS * 4,
                                                                        order, n_tiles);
        }
        return;
    }
    reg_alloc<consumer_regs(WARPGROUPS)>();
    pipeline.parity = 0;
    const uint32_t row_scales = smem_address(scratch) + E4m3Operand<F>::kScratchBytes + warp * BLOCK_M * 4;
    float acc[N_BLOCKS][BLOCK_M / 2];
    queue.consume(pipeline, total, [&](QueuedTile queued) {
        const int n_block = queued.n_block;
        const WorkTile tile = queued.rows;
        // The stages of the row's first 128 columns alone have its scale.
        __syncwarp();
        if (lane < BLOCK_M / 4) {
            st_shared_v4(row_scales + lane * 16, ld_shared_v4(pipeline.address() + S::kXScales + lane * 16));
        }
        __syncwarp();
        W4a8RowsMainloop<F, WARPGROUPS, N_BLOCKS, BLOCK_M>(acc, pipeline, smem_address(scratch))
            .template run<WIDTHS...>((args.k + kE4m3BlockK - 1) / kE4m3BlockK, tile.rows);
#pragma unroll
        for (int m = 0; m < N_BLOCKS; ++m) {
            const int tile16 = (n_block + warp / 4 * N_BLOCKS + m) * 4 + warp % 4;
            if (tile16 >= tiles16) break;
            const int row = tile16 * 16 + lane / 4;
            const float* second = PART == kGateUp ? args.up_expert_scale : args.expert_scale;
            scale_sums<BLOCK_M>(acc[m], row_scales + lane % 4 * 8, tile.rows,
                                E4m3Operand<F>::row_scale(args, args.expert_scale, tile.expert, row),
                                E4m3Operand<F>::row_scale(args, second, tile.expert, row + 8));
            if constexpr (PART == kDown) {
                const WeightRows<kDown, kHalves> rows(args, tile.expert, tile16);
                store_bf16<BLOCK_M, 1, kFastSwiglu, false>(args, tile, rows, acc[m], tile16);
            }
        }
        if constexpr (PART == kGateUp) store_h_f32<PART, N_BLOCKS, BLOCK_M>(args, acc, tile, n_block);
    });
}

}  // namespace polymoe
