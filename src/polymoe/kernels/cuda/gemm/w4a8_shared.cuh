// MXFP4 weights and E4M3 rows, multiplied in E4M3 from shared memory, for many rows.
//
// Weights are decoded as in w4a8.cuh, and sums are the same to the bit; but a warpgroup of its own decodes them, to
// shared memory, once for all rows of a work tile, and two others multiply (shared_mainloop.cuh). One persistent CTA
// per SM walks over the tiles (a work tile by 256 rows of weights, 128 for each of the two). A stage is filled with
// codes, scales and x, then with decoded weights, then read.
//
// x comes in permuted tiles, as quantize.cu and this kernel's own epilogue write them (epilogue/e4m3_tiles.cuh). y is
// by permuted row. K and N are multiples of 64: of h, a warpgroup has all of its 64 columns or none.
#pragma once
#include "../dequant/fp4_to_e4m3.cuh"
#include "../epilogue/row_sums.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/stmatrix.cuh"
#include "expert_tiles.cuh"
#include "shared_mainloop.cuh"
#include "w4_producer.cuh"
#include "widths.cuh"

namespace polymoe {

namespace w4a8_shared {

constexpr int kConsumerWarps = 8, kDecoderWarps = 4, kNBlocks = 4, kKBlocks = 2;

// As the producers fill it, and behind that the decoded weights: rows of 128 columns, swizzled by 128 bytes.
template <int BLOCK_M>
struct Stage : W4Stage<Mxfp4ToE4m3, E4m3Tiles, kNBlocks, BLOCK_M, kKBlocks> {
    using Filled = W4Stage<Mxfp4ToE4m3, E4m3Tiles, kNBlocks, BLOCK_M, kKBlocks>;
    static constexpr int kX = 0, kRowScales = Filled::kXScales;
    static constexpr int kWeights = Filled::kBytes, kBytes = kWeights + kNBlocks * 64 * kE4m3BlockK;
};

// mbarriers: a stage's weights are decoded.
struct Decoded {
    uint64_t barriers[kMaxStages];

    __device__ __forceinline__ void init(int stages) {
        for (int i = 0; i < stages; ++i) mbarrier_init(smem_address(&barriers[i]), kDecoderWarps);
    }

    __device__ __forceinline__ uint32_t of(const Pipeline& pipeline) const {
        return smem_address(barriers) + 8 * pipeline.stage;
    }
};

// A warp's 64 rows of weights, from codes to E4M3.
//
// A lane decodes 4 columns of a row, and 16 columns of 8 rows are a matrix of stmatrix. epilogue/row_sums.cuh wants
// the rows of `down` in another order, in which 8 that follow each other would lie in four of eight places of the
// swizzle. So half of the lanes keep row g and get row g + 2, and the others, two rows further on, keep row g + 8 and
// get row g + 6.
template <int PART, class S>
struct Decoder {
    static constexpr bool kExchanges = PART == kDown;
    static constexpr int kAhead = 4;       // tiles whose codes are loaded ahead
    const bool upper;                      // of the lanes that exchange
    uint32_t codes, scales, other_scales;  // the lane's, in a stage
    uint32_t to;                           // of a row of 16 bytes, in a stage
    uint32_t kept[2];                      // with prmt: the scales of the row that is kept, of 32 columns and the next
    const uint32_t lut;

    __device__ __forceinline__ explicit Decoder(uint32_t lut) : upper(threadIdx.x & 8), lut(lut) {
        const uint32_t lane = threadIdx.x % 32, g = lane / 4, block = threadIdx.x / 32 % kDecoderWarps;
        codes = opaque(S::kCodes + block * S::kBlockCodes + lane * 16);
        scales = opaque(S::kScales + block * S::kBlockScales + g * 16);
        other_scales = opaque(S::kScales + block * S::kBlockScales + (g ^ 2) * 16);
        const uint32_t i = lane % 8, matrix = lane / 8, row = packed_row(i, matrix % 2);
        to = opaque(S::kWeights + (block * 64 + row) * kE4m3BlockK + ((matrix / 2) ^ (row % 8)) * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) kept[half] = 0x4440 + half * 2 + upper;
    }

    // Where row i of a matrix of the first 8 rows, or of the second, stands among 16.
    static __device__ __forceinline__ uint32_t packed_row(uint32_t i, bool second) {
        if (!kExchanges) return i + second * 8;
        const bool upper = i & 2;
        const uint32_t row = second ? (upper ? i + 6 : i + 2) : (upper ? i + 8 : i);
        return row / 2 % 2 * 8 + row / 4 * 2 + row % 2;
    }

    // Whether one of the scales is further from its row's largest than is computed.
    static __device__ __forceinline__ bool far(uint4 offsets) {
        static_assert((kComputedStep + 1) * 8 == 0x60);
        const uint32_t both = (offsets.x & offsets.x << 1) | (offsets.y & offsets.y << 1) |
                              (offsets.z & offsets.z << 1) | (offsets.w & offsets.w << 1);
        return both & 0x40404040u;
    }

    // A stage: 8 times 16 rows by 64 columns. Of a stage of 64 columns, the other half is what lies there.
    __device__ __forceinline__ void decode(uint32_t stage) const {
        uint4 own[kKBlocks], other[kKBlocks], ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kKBlocks; ++i) {
            own[i] = ld_shared_v4(stage + scales + i * 128);
            other[i] = kExchanges ? ld_shared_v4(stage + other_scales + i * 128) : own[i];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) ahead[i] = load_codes(stage, i);
        if (__ballot_sync(0xFFFFFFFFu, far(own[0]) || far(own[1]))) {
            decode_tiles<true>(stage, ahead, own, other);
        } else {
            decode_tiles<false>(stage, ahead, own, other);
        }
    }

    __device__ __forceinline__ uint4 load_codes(uint32_t stage, int i) const {
        return ld_shared_v4(stage + codes + i * 512);
    }

    template <bool LOOKS_UP>
    __device__ __forceinline__ void decode_tiles(uint32_t stage, uint4 (&ahead)[kAhead], const uint4 (&own)[kKBlocks],
                                                 const uint4 (&other)[kKBlocks]) const {
#pragma unroll
        for (int i = 0; i < 4 * kKBlocks; ++i) {
            const uint4 w = ahead[i % kAhead];
            if (i + kAhead < 4 * kKBlocks) ahead[i % kAhead] = load_codes(stage, i + kAhead);
            const uint32_t own_word = word_of(own[i / 4], i % 4), other_word = word_of(other[i / 4], i % 4);
            const uint32_t tile = (stage + to) ^ i / 4 * 64;
            decode_half<LOOKS_UP, 0>(tile + i % 4 * 16 * kE4m3BlockK, w.x, w.y, own_word, other_word);
            decode_half<LOOKS_UP, 1>((tile ^ 32) + i % 4 * 16 * kE4m3BlockK, w.z, w.w, own_word, other_word);
        }
    }

    static __device__ __forceinline__ uint32_t word_of(uint4 v, int i) {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }

    // 32 columns of 16 rows, HALF of the first 64 or not: of rows g and g + 8, words of codes, and offsets.
    template <bool LOOKS_UP, int HALF>
    __device__ __forceinline__ void decode_half(uint32_t to, uint32_t low, uint32_t high, uint32_t own,
                                                uint32_t other) const {
        uint32_t first = low, second = high, first_offset, second_offset;
        if constexpr (kExchanges) {
            first = upper ? high : low;
            second = __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, 8);
            first_offset = prmt(make_uint2(own, 0), kept[HALF]), second_offset = prmt(make_uint2(other, 0), kept[HALF]);
        } else {
            first_offset = extract_byte<HALF * 2>(own), second_offset = extract_byte<HALF * 2 + 1>(own);
        }
        uint32_t a[4];
        dequant_e2m1_to_e4m3(a[0], a[2], first, magnitudes<LOOKS_UP>(first_offset));
        dequant_e2m1_to_e4m3(a[1], a[3], second, magnitudes<LOOKS_UP>(second_offset));
        stmatrix_x4(to, a);
    }

    // Where a matrix has no such rows, offsets are other bytes.
    template <bool LOOKS_UP>
    __device__ __forceinline__ uint2 magnitudes(uint32_t offset) const {
        if (LOOKS_UP) return ld_shared_v2(lut + (offset & 0x78u));
        return e2m1_magnitudes(offset);
    }
};

template <int BLOCK_M>
struct Mainloop : SharedMainloop<Mainloop<BLOCK_M>, Stage<BLOCK_M>, BLOCK_M> {
    using Base = typename Mainloop::SharedMainloop;
    using Base::pipeline;
    const Decoded& decoded;

    __device__ __forceinline__ Mainloop(RowSums<BLOCK_M>& acc, Pipeline& pipeline, const Decoded& decoded)
        : Base(acc, pipeline), decoded(decoded) {}

    template <int ROWS>
    __device__ __forceinline__ void run(int k) {
        this->template clear<ROWS>();
        this->template add<ROWS, kE4m3BlockK>(k / kE4m3BlockK);
        this->template add<ROWS, kE4m3BlockK / 2>(k % kE4m3BlockK / 64);
    }

    __device__ __forceinline__ uint32_t wait() const {
        const uint32_t stage = pipeline.wait_full();  // of x
        mbarrier_wait(decoded.of(pipeline), pipeline.parity);
        return stage;
    }

    __device__ __forceinline__ void load_scales(uint32_t stage, int m, float (&scales)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i][0] = scales[i][1] = this->row_scale(stage, m, i);
    }

    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.empty_barrier());
    }
};

// How many times 8 rows of weights a warpgroup has, of which the first is that of block `n_block`.
__device__ __forceinline__ int groups_of(const GemmArgs& args, int n_block) {
    return min(16, max(0, args.n / 8 - n_block * 8));
}

// Sums times the scales of their rows of weights, with biases; zeros where there are no such rows.
template <int PART, int BLOCK_M>
__device__ __forceinline__ void scale_sums(const GemmArgs& args, RowSums<BLOCK_M>& acc, WorkTile tile, int n_block) {
    const uint8_t* row_max = args.scales + tile.expert * args.scales_stride + args.n / 64 * (args.k / 64) * 128;
    const long long biases = static_cast<long long>(tile.expert) * width_of<PART>(args) + first_column<PART>(n_block);
    const int groups = groups_of(args, n_block);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const bool of_up = PART == kGateUp && j % 2;
        const int column = lane_column<PART>(j), row = PART == kGateUp ? j * 8 + threadIdx.x % 4 * 2 : column;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float scale = 0.0f, bias = 0.0f;
            if (j < groups) {
                scale = Mxfp4ToE4m3::row_scale(row_max + n_block * 64 + row + c,
                                               of_up ? args.up_expert_scale : args.expert_scale, tile.expert);
                bias = load_bias(of_up ? args.up_bias : args.bias, args.bias_dtype, biases + column + c);
            }
            for_lane_rows<BLOCK_M>(tile, [&](int m, int i, int) {
                float& sum = acc[m][4 * j + 2 * i + c];
                sum = j < groups ? fmaf(sum, scale, bias) : 0.0f;
            });
        }
    }
}

}  // namespace w4a8_shared

// 256 rows of weights by up to BLOCK_M rows of x, in MMAs for as many or, where that is enough, for one of the smaller
// WIDTHS.
template <int PART, int WARPGROUPS, int N_BLOCKS, int K_BLOCKS, int STAGE_BYTES, int BLOCK_M, int... WIDTHS>
__device__ __forceinline__ void w4a8_shared_gemm(const GemmArgs& args) {
    using namespace w4a8_shared;
    using S = w4a8_shared::Stage<BLOCK_M>;
    static_assert(WARPGROUPS == w8::kWarpgroups && N_BLOCKS == w8::kNBlocks && K_BLOCKS == kKBlocks && PART != kUp);
    static_assert(S::kBytes == STAGE_BYTES);
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
    __shared__ float maxima[2][WARPGROUPS][BLOCK_M];  // of rows of h, for two alternating tiles
    __shared__ Decoded decoded;
    __shared__ TileQueue queue;
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32);
    Pipeline pipeline = make_pipeline(args, align_stages(memory), barriers, STAGE_BYTES);
    if (threadIdx.x == 0) init_barriers(args, pipeline, kProducerWarps, kConsumerWarps, queue, decoded);
    const uint32_t lut = pipeline.data + pipeline.stages * STAGE_BYTES;
    if (threadIdx.x < kLutSteps) {
        const uint64_t entry = e2m1_lut(threadIdx.x);
        st_shared(lut + threadIdx.x * 8, static_cast<uint32_t>(entry));
        st_shared(lut + threadIdx.x * 8 + 4, static_cast<uint32_t>(entry >> 32));
    }
    __syncthreads();
    const LaunchOrder order(args);
    order.begin<PART>();
    const int n_tiles = (args.n + 255) / 256, total = order.work_tiles * n_tiles;

    if (warp >= kConsumerWarps + kDecoderWarps) {
        reg_dealloc<40>();
        pipeline.parity = 1;
        if (lane == 0) {
            produce_w4<Mxfp4ToE4m3, E4m3Tiles, kNBlocks, BLOCK_M, K_BLOCKS, PART, false, ExpertTiles<kNBlocks>>(
                args, pipeline, queue, warp - kConsumerWarps - kDecoderWarps, order, n_tiles);
        }
        return;
    }
    pipeline.parity = 0;
    if (warp >= kConsumerWarps) {
        reg_dealloc<56>();
        const Decoder<PART, S> decoder(lut);
        const int stages = (args.k + kE4m3BlockK - 1) / kE4m3BlockK;
        queue.consume(pipeline, total, [&](QueuedTile) {
            for (int left = stages; left > 0; --left) {
                const uint32_t stage = pipeline.wait_full();
                decoder.decode(stage);
                fence_proxy_async();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(decoded.of(pipeline));
                pipeline.advance();
            }
        });
        return;
    }
    reg_alloc<208>();
    const int warpgroup = warp / 4;
    int buffer = 0;  // of maxima
    queue.consume(pipeline, total, [&](QueuedTile queued) {
        const WorkTile tile = queued.rows;
        RowSums<BLOCK_M> acc;
        Mainloop<BLOCK_M> mainloop(acc, pipeline, decoded);
        with_narrowest<WIDTHS..., BLOCK_M>(tile.rows,
                                           [&](auto width) { mainloop.template run<decltype(width)::value>(args.k); });
        const int n_block = queued.n_block + warpgroup * N_BLOCKS;
        scale_sums<PART, BLOCK_M>(args, acc, tile, n_block);
        if constexpr (PART == kDown) {
            store_y_rows<BLOCK_M>(args, acc, tile, n_block, groups_of(args, n_block));
        } else {
            store_h_tiles<BLOCK_M, false>(args, acc, tile, n_block, maxima[buffer]);
            buffer ^= 1;
        }
    });
}

}  // namespace polymoe
