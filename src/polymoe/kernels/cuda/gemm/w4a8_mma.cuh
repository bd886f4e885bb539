// MXFP4 weights and rows that are rounded to E4M3 in the kernel, both as float16 by mma.sync: for few rows an expert,
// where time is the reading of weights and the launches around it. One scale is that of a whole row of x.
//
// Tiles, weights and sums are those of w4a16_mma with one team. Its second producer warp rounds rows instead of copying
// them: it finds a row's maximum, and stores its codes as float16, which holds every number of E4M3, and behind them
// the scale. So neither x nor h takes a launch that rounds it. h is stored as float32, by permuted row.
//
// Weights are in the layout w4a8_fragments. A weight of E2M1 times the distance of its scale from the row's largest is
// a power of two times 1 or 1.5, of which float16 needs the high byte alone, as E4M3 does its only one: a permutation
// of bytes finds it in a table of eight, which follows from the scale. The order of columns is the layout's: of each
// 16, a lane t has columns 4t to 4t + 3, where mma.sync would have 2t, 2t + 1, 2t + 8 and 2t + 9.
#pragma once
#include "../dequant/fp4_to_e4m3.cuh"
#include "../exact_divide.cuh"
#include "../ptx/mma_f16.cuh"
#include "w4a16_mma.cuh"
#include "w8a8_mma.cuh"

namespace polymoe {
namespace w4a8_mma {

constexpr uint32_t kAll = 0xFFFFFFFFu;

// The high bytes of the eight magnitudes of E2M1 times 2^(6 - step) in float16. Byte I of `steps` is 4 * step.
template <int I>
__device__ __forceinline__ uint2 e2m1_f16_table(uint32_t steps) {
    const uint2 bytes = make_uint2(steps, 0);
    return make_uint2(0x56545000u - prmt(bytes, 0x1110 * I + 4), 0x5E5C5A58u - prmt(bytes, 0x1111 * I));
}

// 32 columns of 16 rows of weights: operands for columns 4t to 4t + 3 of the first 16, and of the last. HALF: which
// columns of a block.
template <int HALF>
__device__ __forceinline__ void dequantize(uint32_t (&a)[2][4], const uint32_t (&words)[4], uint32_t steps) {
    uint32_t bytes[2][2];  // by 16 columns, by row
    dequant_e2m1_to_e4m3(bytes[0][0], bytes[1][0], words[2 * HALF], e2m1_f16_table<2 * HALF>(steps));
    dequant_e2m1_to_e4m3(bytes[0][1], bytes[1][1], words[2 * HALF + 1], e2m1_f16_table<2 * HALF + 1>(steps));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            a[step][row] = prmt(make_uint2(bytes[step][row], 0), 0x1404);
            a[step][2 + row] = prmt(make_uint2(bytes[step][row], 0), 0x3424);
        }
    }
}

// A block's columns of two tiles of 16 rows of weights, for 8 * M rows of x.
template <int M, int M_BLOCKS>
__device__ __forceinline__ void mma_block(float (&acc)[2][M_BLOCKS][4], uint32_t codes, uint32_t scales, uint32_t x,
                                          uint32_t x_eight_rows, uint32_t empty, bool leader) {
    uint32_t b[M][2][4];
    const uint4 words[2] = {ld_shared_v4(codes), ld_shared_v4(codes + 512)};
    const uint2 offsets = ld_shared_v2(scales);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) ldmatrix_x4(b[m][i], x + m * x_eight_rows + i * 64);
    }
    __syncwarp();
    if (leader) mbarrier_arrive(empty);
    const uint32_t steps[2] = {offsets.x >> 1 & 0x3C3C3C3Cu, offsets.y >> 1 & 0x3C3C3C3Cu};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint32_t word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            uint32_t a[2][4];
            if (half == 0) {
                dequantize<0>(a, word, steps[tile]);
            } else {
                dequantize<1>(a, word, steps[tile]);
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const uint32_t columns[2] = {b[m][half][2 * step], b[m][half][2 * step + 1]};
                    mma_m16n8k16_f16(acc[tile][m], a[step], columns);
                }
            }
        }
    }
}

// 16 columns of x. dtype: as in RoundingArgs.
__device__ __forceinline__ void load_columns(const void* all, int dtype, long long first, float (&v)[16]) {
    if (dtype == 2) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(all) + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = from[i];
            v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
        }
        return;
    }
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(all) + first);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 eight = from[i];
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
            v[8 * i + j] = dtype == 0 ? bf16_to_f32(bits) : f16_to_f32(bits);
        }
    }
}

// What the sums of rows g and g + 8 of the tile number `tile16` are multiplied by.
template <int PART>
struct RowScales {
    float low = 0.0f, high = 0.0f;

    __device__ __forceinline__ void load(const GemmArgs& args, int expert, int tile16, int lane) {
        const int row = tile16 * 16 + lane / 4;
        const uint8_t* row_max =
            args.scales + expert * args.scales_stride + (args.n + 63) / 64 * (args.k / 64) * 128LL + row;
        const float* second = PART == kGateUp ? args.up_expert_scale : args.expert_scale;
        low = Mxfp4ToE4m3::row_scale(row_max, args.expert_scale, expert);
        high = Mxfp4ToE4m3::row_scale(row_max + 8, second, expert);
    }
};

// Writes 16 rows of weights by 8 rows of x in float32. h goes to permuted rows, y to expanded rows.
template <int PART>
__device__ __forceinline__ void store(const GemmArgs& args, const float (&c)[4], int expert,
                                      const RowScales<PART>& scales, const w4a16_mma::OutRows<PART>& to, int tile16,
                                      int lane) {
    const int g = lane / 4, n = PART == kGateUp ? tile16 * 8 + g : tile16 * 16 + g;
    const int width = PART == kGateUp ? args.n / 2 : args.n;
    const long long bias = static_cast<long long>(expert) * width + n;
    const float low_bias = load_bias(args.bias, args.bias_dtype, bias);
    const float high_bias = PART == kGateUp ? load_bias(args.up_bias, args.bias_dtype, bias)
                                            : load_bias(args.bias, args.bias_dtype, bias + 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (to.row[i] < 0) break;
        float* out = static_cast<float*>(args.out) + static_cast<long long>(to.row[i]) * width + n;
        const float low = c[i] * scales.low + low_bias, high = c[2 + i] * scales.high + high_bias;
        if (PART == kDown) {
            out[0] = low, out[8] = high;
        } else {
            *out = args.activation == kSwiglu ? fast_swiglu(args, low, high) : gated_activation(args, low, high);
        }
    }
}

template <int PART, int M_BLOCKS>
struct Cta : w4a16_mma::Cta<Mxfp4ToE4m3, PART, M_BLOCKS, 64, 1, false> {
    using Base = w4a16_mma::Cta<Mxfp4ToE4m3, PART, M_BLOCKS, 64, 1, false>;
    using Base::kStageK, Base::kXBytes, Base::kXBeside;
    using Base::memory, Base::work_tiles, Base::permuted_to_expanded, Base::full, Base::empty, Base::x_full,
        Base::x_empty, Base::x_start, Base::stages_start, Base::stride, Base::stage_bytes, Base::tiles16, Base::n_tiles,
        Base::tile_stages, Base::begin, Base::end;
    static_assert(kXBeside);

    const RoundingArgs& args;

    __device__ __forceinline__ Cta(const RoundingArgs& args, uint8_t* memory, uint64_t* barriers,
                                   const SortedRows& sorted)
        : Base(args, memory, barriers, sorted), args(args) {}

    // A row of x to `to`. Each 16 columns are in the order of the weights' layout.
    __device__ __forceinline__ void round_row(long long row, int expert, uint32_t to, int lane) const {
        const int dtype = PART == kDown ? 2 : args.x_dtype;
        float v[16], scale = 0.0f;
        if (args.input_scales) {
            scale = args.input_scales[expert];
        } else {
#pragma unroll 2
            for (int column = lane * 16; column < args.k; column += 512) {
                load_columns(args.x, dtype, row * args.k + column, v);
#pragma unroll
                for (int i = 0; i < 16; ++i) scale = fmaxf(scale, fabsf(v[i]));
            }
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) scale = fmaxf(scale, __shfl_xor_sync(kAll, scale, lanes));
            scale /= 448.0f;
            if (scale == 0.0f) scale = 1.0f;
        }
        const float inverse = fminf(1.0f / scale, 3.4028235e38f);
#pragma unroll 2
        for (int column = lane * 16; column < args.k; column += 512) {
            load_columns(args.x, dtype, row * args.k + column, v);
            uint32_t words[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) v[4 * i + j] = exact_divide(v[4 * i + j], scale, inverse);
                const uint32_t codes = pack_e4m3x2(v[4 * i], v[4 * i + 1]) | pack_e4m3x2(v[4 * i + 2], v[4 * i + 3])
                                                                                 << 16;
                words[i] = e4m3x2_to_f16x2_low(codes), words[4 + i] = e4m3x2_to_f16x2_high(codes);
            }
            st_shared_v4(to + column * 2, make_uint4(words[0], words[1], words[2], words[3]));
            st_shared_v4(to + column * 2 + 16, make_uint4(words[4], words[5], words[6], words[7]));
        }
        if (lane == 0) st_shared(to + args.k * 2, __float_as_uint(scale));
    }

    // One warp.
    __device__ __forceinline__ void round_x(int lane) const {
        int buffer = 0;
        uint32_t parity = 1;
        for (int index = begin / n_tiles; index * n_tiles < end; ++index) {
            const WorkTile tile = work_tiles[index];
            mbarrier_wait(x_empty + 8 * buffer, parity);
            for (int i = 0; i < tile.rows; ++i) {
                const int row = tile.row + i;
                const long long from = args.top_k ? permuted_to_expanded[row] / args.top_k : row;
                round_row(from, tile.expert, x_start + (buffer * args.block_m + i) * stride, lane);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(x_full + 8 * buffer);
            if (++buffer == args.x_buffers) buffer = 0, parity ^= 1;
        }
    }

    // As multiply_parts of w4a16_mma: all warps on one tile, of which eight share two tiles of 16 rows of weights.
    __device__ __forceinline__ void multiply(int warp, int lane) const {
        constexpr int kPieces = 32 / kStageK * M_BLOCKS;  // 16 rows of weights by 8 rows of x each
        static_assert(kPieces <= kMmaConsumerWarps);
        const int half = warp / kStageK, part = warp % kStageK;
        const int my_blocks = (args.k / 64 - part + kStageK - 1) / kStageK;
        const uint32_t x_lane = this->lane_x(lane) + part * kXBytes, x_eight_rows = this->eight_rows(lane);
        const uint32_t x_buffer_bytes = opaque(args.block_m * stride);
        const uint32_t codes_lane = opaque(stages_start + half * 1024 + lane * 16);
        const uint32_t scales_lane =
            opaque(stages_start + w4a16_mma::kStageCodes + part * Mxfp4ToE4m3::kScaleBytes + lane / 4 * 16 + half * 8);
        const bool leader = opaque(lane) == 0;
        int stage = 0, buffer = 0, index = begin / n_tiles, n_tile = begin - index * n_tiles;
        uint32_t parity = 0, x_parity = 0;
        bool new_x = true, few = true;
        float x_scales[M_BLOCKS][2];  // of rows 2t and 2t + 1 of each 8
        for (int i_tile = begin; i_tile < end; ++i_tile) {
            const int tiles = this->width(n_tile), blocks = 2 * half < tiles ? my_blocks : 0;
            // What this warp will add up and store, if anything: other warps from tile to tile.
            const int piece = (warp + i_tile * kPieces) % kMmaConsumerWarps, tile16 = n_tile * 4 + piece / M_BLOCKS;
            const bool stores = piece < kPieces && tile16 < tiles16;
            RowScales<PART> scales;
            if (stores) scales.load(args, work_tiles[index].expert, tile16, lane);
            if (new_x) {
                mbarrier_wait(x_full + 8 * buffer, x_parity);
                few = M_BLOCKS == 1 || work_tiles[index].rows <= 8;
#pragma unroll
                for (int m = 0; m < M_BLOCKS; ++m) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int row = min(m * 8 + lane % 4 * 2 + i, args.block_m - 1);
                        x_scales[m][i] =
                            __uint_as_float(ld_shared(x_start + (buffer * args.block_m + row) * stride + args.k * 2));
                    }
                }
            }
            new_x = n_tile == n_tiles - 1 || i_tile == end - 1;  // after this, the work tile's last tile here
            uint32_t x = x_lane + buffer * x_buffer_bytes;
            const uint32_t codes_part = opaque(codes_lane + part * tiles * 512);
            float acc[2][M_BLOCKS][4] = {};
            int s = 0;
            // Beyond the last tile this reads other bytes of the stage, and computes what nobody reads.
            if (few) {
                for (; s < blocks; ++s) {
                    mbarrier_wait(full + 8 * stage, parity);
                    mma_block<1>(acc, codes_part + stage * stage_bytes, scales_lane + stage * stage_bytes, x,
                                 x_eight_rows, empty + 8 * stage, leader);
                    x += kStageK * kXBytes;
                    this->advance(stage, parity);
                }
            } else {
                for (; s < blocks; ++s) {
                    mbarrier_wait(full + 8 * stage, parity);
                    mma_block<M_BLOCKS>(acc, codes_part + stage * stage_bytes, scales_lane + stage * stage_bytes, x,
                                        x_eight_rows, empty + 8 * stage, leader);
                    x += kStageK * kXBytes;
                    this->advance(stage, parity);
                }
            }
            for (; s < tile_stages; ++s) {
                mbarrier_wait(full + 8 * stage, parity);
                __syncwarp();
                if (leader) mbarrier_arrive(empty + 8 * stage);
                this->advance(stage, parity);
            }
            if (new_x) {
                __syncwarp();
                if (leader) mbarrier_arrive(x_empty + 8 * buffer);
                if (++buffer == args.x_buffers) buffer = 0, x_parity ^= 1;
            }
            float4* partial = reinterpret_cast<float4*>(memory) + lane;
            named_barrier_sync(1, kMmaConsumerWarps * 32);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int m = 0; m < M_BLOCKS; ++m) {
                    const float* c = acc[i][m];
                    const float first = x_scales[m][0], second = x_scales[m][1];
                    partial[(part * kPieces + (half * 2 + i) * M_BLOCKS + m) * 32] =
                        make_float4(c[0] * first, c[1] * second, c[2] * first, c[3] * second);
                }
            }
            named_barrier_sync(2, kMmaConsumerWarps * 32);
            if (stores) {
                float4 sum = partial[piece * 32];
#pragma unroll
                for (int p = 1; p < kStageK; ++p) {
                    const float4 more = partial[(p * kPieces + piece) * 32];
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                const float c[4] = {sum.x, sum.y, sum.z, sum.w};
                const WorkTile tile = work_tiles[index];
                const w4a16_mma::OutRows<PART> to(permuted_to_expanded, tile, piece % M_BLOCKS * 8, lane);
                store<PART>(args, c, tile.expert, scales, to, tile16, lane);
            }
            if (++n_tile == n_tiles) n_tile = 0, ++index;
        }
    }
};

}  // namespace w4a8_mma

template <class F, int PART, int M_BLOCKS, int BLOCK_N, int TEAMS, int STAGE_BYTES>
__device__ __forceinline__ void w4a8_mma_gemm(const RoundingArgs& args) {
    using namespace w4a8_mma;
    static_assert(BLOCK_N == 64 && TEAMS == 1 && PART != kUp && w4a16_mma::kStageBytes<F> == STAGE_BYTES);
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMaxStages + 4];
    __shared__ SortedRows sorted;
    Cta<PART, M_BLOCKS> cta(args, memory, barriers, sorted);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) cta.init_barriers();
    // For `down`, ids and work tiles were complete before the kernel ahead of it let it start; x was not.
    if (args.ids && warp == kMmaConsumerWarps) {
        if (PART != kDown) grid_dependency_wait();
        sorted.sort(args);
    }
    __syncthreads();
    if (PART != kDown) {
        grid_dependency_wait();
        launch_dependents();
    }
    cta.take_share(args.ids ? sorted.num_tiles : *args.num_tiles);
    if (warp == kMmaConsumerWarps) {
        if (lane == 0) cta.produce_weights();
    } else if (warp == kMmaConsumerWarps + 1) {
        if (PART == kDown) {
            grid_dependency_wait();
            launch_dependents();
        }
        cta.round_x(lane);
    } else {
        cta.multiply(warp, lane);
    }
}

}  // namespace polymoe
