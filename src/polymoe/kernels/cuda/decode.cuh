// Decode: few rows an expert, so time is the reading of weights. One block a multiprocessor walks over its share of
// (item, 64 rows of weights) tiles; one warp keeps a ring of weights in shared memory filled, across tiles and experts,
// one brings the items' rows of x, and sixteen decode and multiply, eight ways along K.
//
// An item is one expert with up to 8 * NB of the rows that chose it.
#pragma once
#include "formats.cuh"
#include "gemm.cuh"

namespace polymoe {

constexpr int kConsumers = 16;
constexpr int kWarps = kConsumers + 2;
constexpr int kStageBlocks = 8;  // of 64 x 64 weights in a stage of the ring: one for every two warps
constexpr int kStageCodes = kStageBlocks * 2048;
constexpr int kMostStages = 16;

template <class F>
constexpr int kStage = kStageCodes + kStageBlocks / F::kBlocks * kScaleBytes<F>;

// Decoded weights times their scales, times x: `bytes` are the tiles' words of scales, b x's columns.
template <class F, int N, int NB>
__device__ __forceinline__ void multiply_words(float (&acc)[2][NB][4], const uint4 (&words)[2], const uint32_t (&bytes)[2][2],
                                               const uint32_t (&b)[N][2][4], F) {
    const typename F::Scales factors[2] = {F::scales(bytes[0]), F::scales(bytes[1])};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint32_t word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            uint32_t a[4];
            decode<F>(a, word[step], F::scale(factors[tile], step));
#pragma unroll
            for (int n = 0; n < N; ++n) {
                multiply_add(acc[tile][n], a, b[n][step / 2][step % 2 * 2], b[n][step / 2][step % 2 * 2 + 1]);
            }
        }
    }
}

// The same with fewer instructions for int4 and 8 rows of x: codes are multiplied as they are easiest to make, 136 too
// large, on top of -136 times the sum of x, which the matrix units make too. Sums of a group of columns are multiplied by
// its scale. Not in kernels for more rows, where a row's sum must not depend on how many others its item has.
template <int GROUP>
__device__ __forceinline__ void multiply_words(float (&acc)[2][1][4], const uint4 (&words)[2], const uint32_t (&bytes)[2][2],
                                               const uint32_t (&b)[1][2][4], Int4<GROUP>) {
    constexpr int kSteps = GROUP == 32 ? 2 : 4;  // of 16 columns that share a scale
    const uint32_t minus_136[4] = {kMinus136, kMinus136, kMinus136, kMinus136};
#pragma unroll
    for (int first = 0; first < 4; first += kSteps) {
        float zero[4] = {};
#pragma unroll
        for (int step = first; step < first + kSteps; ++step) {
            multiply_add(zero, minus_136, b[0][step / 2][step % 2 * 2], b[0][step / 2][step % 2 * 2 + 1]);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint32_t word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            float sum[4];
#pragma unroll
            for (int step = first; step < first + kSteps; ++step) {
                uint32_t a[4];
                decode_int4_and_136(a, word[step]);
                multiply_add(sum, step == first ? zero : sum, a, b[0][step / 2][step % 2 * 2],
                             b[0][step / 2][step % 2 * 2 + 1]);
            }
            const uint32_t scales = Int4<GROUP>::scale(Int4<GROUP>::scales(bytes[tile]), first);
            const float low = __uint_as_float(scales << 16), high = __uint_as_float(scales & 0xFFFF0000u);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[tile][0][i] = fmaf(sum[i], i < 2 ? low : high, acc[tile][0][i]);
        }
    }
}

// 64 columns of two tiles of 16 rows, for 8 * N rows of the item: acc += weights * x. All loads stand in front, since
// volatile assembly keeps its order, and the ring's slot is given back as soon as they are made.
template <class F, int N, int NB>
__device__ __forceinline__ void multiply_block(
    float (&acc)[2][NB][4], uint32_t codes, uint32_t scales, uint32_t x, uint32_t x_eight, uint32_t empty,
    bool leader) {
    uint32_t b[N][2][4], bytes[2][2];
    const uint4 words[2] = {load_shared_16(codes), load_shared_16(codes + 512)};
    load_scale_words<F>(bytes, scales);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        load_matrices_4(b[n][0], x + n * x_eight);
        load_matrices_4(b[n][1], x + n * x_eight + 64);
    }
    __syncwarp();
    if (leader) barrier_arrive(empty);
    multiply_words(acc, words, bytes, b, F());
}

// The rest of a row, fewer than 64 columns, word by word.
template <class F, int NB>
__device__ __forceinline__ void multiply_rest(
    float (&acc)[2][NB][4], uint32_t codes, uint32_t scales, uint32_t x, uint32_t x_eight, int steps, int tiles) {
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        if (step == steps) break;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            if (tile < tiles) {
                const typename F::Scales factors = load_scales<F>(scales + tile * F::kTileScales);
                uint32_t a[4];
                decode<F>(a, load_shared_4(codes + (tile * steps + step) * 128), F::scale(factors, step));
#pragma unroll
                for (int n = 0; n < NB; ++n) {
                    uint32_t b0, b1;
                    load_matrices_2(b0, b1, x + n * x_eight + step * 32);
                    multiply_add(acc[tile][n], a, b0, b1);
                }
            }
        }
    }
}

template <class F, int MATRIX>
__device__ __forceinline__ void finish(
    const GemmArgs& args, float4 c, int4 item, int tile16, int n0, int lane) {
    const int g = lane / 4;
    const float low_scale = unscale<F>(args.scale, item.x);
    const float high_scale = MATRIX == kGated ? unscale<F>(args.up_scale, item.x) : low_scale;
    const float low[2] = {c.x * low_scale, c.y * low_scale}, high[2] = {c.z * high_scale, c.w * high_scale};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int n = n0 + 2 * (lane % 4) + i;
        if (n >= item.z) break;
        const int row = item.y + n;
        if (MATRIX == kDown) {
            const int r = tile16 * 16 + g;
            const long long at = static_cast<long long>(item.x) * args.rows + r;
            float* out = static_cast<float*>(args.out) + static_cast<long long>(args.order[row]) * args.rows + r;
            out[0] = low[i] + load_bias(args.bias, args.bias_dtype, at);
            out[8] = high[i] + load_bias(args.bias, args.bias_dtype, at + 8);
        } else {
            const float weight = args.weights ? args.weights[args.order[row]] : 1.0f;
            if (MATRIX == kGated) {
                const int width = args.rows / 2, r = tile16 * 8 + g;
                const long long at = static_cast<long long>(item.x) * width + r;
                const float gate = low[i] * weight + load_bias(args.bias, args.bias_dtype, at);
                const float up = high[i] * weight + load_bias(args.up_bias, args.bias_dtype, at);
                static_cast<uint16_t*>(args.out)[static_cast<long long>(row) * width + r] =
                    to_bfloat16(gated(args, gate, up));
            } else {
                const int r = tile16 * 16 + g;
                const long long at = static_cast<long long>(item.x) * args.rows + r;
                uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(row) * args.rows + r;
                const float a = fmaxf(low[i] * weight + load_bias(args.bias, args.bias_dtype, at), 0.0f);
                const float b = fmaxf(high[i] * weight + load_bias(args.bias, args.bias_dtype, at + 8), 0.0f);
                out[0] = to_bfloat16(a * a);
                out[8] = to_bfloat16(b * b);
            }
        }
    }
}

// PARTS warps share a pair of tiles along K; 16 / PARTS pairs of tiles are made at once: 512 / PARTS rows.
template <class F, int NB, int PARTS, int MATRIX>
__device__ __forceinline__ void decode_gemm(const GemmArgs& args) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ __align__(8) uint64_t full[2 * kMostStages], x_full[2], x_empty[2];
    constexpr int kGroups = kStageBlocks / PARTS;  // of 64 rows in a tile
    constexpr int kSums = kConsumers * 2 * NB * 512;  // bytes of partial sums
    const uint32_t x_at = shared_address(memory) + kSums;
    const int stride = args.columns * 2 + 16;  // of a row of x: rows start 4 banks apart
    const uint32_t ring = (x_at + args.buffers * args.item_rows * stride + 127) / 128 * 128;
    const uint32_t full_at = kept(shared_address(full)), empty_at = full_at + 8 * kMostStages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; ++i) {
            barrier_init(full_at + 8 * i, 1);
            barrier_init(empty_at + 8 * i, kConsumers);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&x_full[i]), 1);
            barrier_init(shared_address(&x_empty[i]), kConsumers);
        }
        barrier_init_visible();
    }
    __syncthreads();
    // Items were complete before the kernel in front of `down` let it start; x was not.
    if (MATRIX != kDown) {
        wait_for_previous_kernel();
        let_next_kernel_start();
    }

    constexpr int kBytes = kScaleBytes<F>;
    const int tiles16 = args.rows / 16, groups = (tiles16 + 3) / 4, tiles = (groups + kGroups - 1) / kGroups;
    const int units = (args.columns + 63) / 64, stages_of_tile = (units + PARTS - 1) / PARTS;
    const int strip = scale_units<F>(args.columns);  // times that scales stand beside a row
    const long long total = static_cast<long long>(*args.count) * tiles;
    const int begin = static_cast<int>(total * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);

    if (warp == kConsumers) {  // weights
        if (lane == 0) {
            int slot = 0;
            uint32_t parity = 1;
            for (int at = begin; at < end; ++at) {
                const int index = at / tiles, group = (at - index * tiles) * kGroups;
                const long long expert = args.items[index].x;
                const uint8_t* codes = args.codes + expert * args.codes_expert + 32LL * group * args.columns;
                const uint8_t* scales = args.scales + expert * args.scales_expert +
                                        static_cast<long long>(group) * strip * kBytes;
                for (int s = 0; s < stages_of_tile; ++s) {
                    const uint32_t barrier = full_at + 8 * slot, to = ring + slot * kStage<F>;
                    const int first_scale = s * PARTS / F::kBlocks;
                    const int scale_bytes = min(PARTS / F::kBlocks, strip - first_scale) * kBytes;
                    barrier_wait(empty_at + 8 * slot, parity);
                    uint32_t bytes = 0;
#pragma unroll
                    for (int i = 0; i < kGroups; ++i) {
                        const int width = min(4, tiles16 - 4 * (group + i));
                        if (width <= 0) break;
                        bytes += min(PARTS * width * 512, width * 8 * args.columns - s * PARTS * width * 512);
                        bytes += scale_bytes;
                    }
                    barrier_arrive_expect(barrier, bytes);
#pragma unroll
                    for (int i = 0; i < kGroups; ++i) {
                        const int width = min(4, tiles16 - 4 * (group + i)), done = s * PARTS * width * 512;
                        if (width <= 0) break;
                        copy_bulk_once(to + i * PARTS * 2048, codes + 32LL * i * args.columns + done,
                                       min(PARTS * width * 512, width * 8 * args.columns - done), barrier);
                        copy_bulk_once(to + kStageCodes + i * PARTS / F::kBlocks * kBytes,
                                       scales + (i * strip + first_scale) * kBytes, scale_bytes, barrier);
                    }
                    if (++slot == args.stages) slot = 0, parity ^= 1;
                }
            }
        }
    } else if (warp == kConsumers + 1) {  // rows of x
        if (MATRIX == kDown) {
            wait_for_previous_kernel();
            let_next_kernel_start();
        }
        int buffer = 0;
        uint32_t parity = 1;
        for (int index = begin / tiles; index * tiles < end; ++index) {
            const int4 item = args.items[index];
            const uint32_t barrier = shared_address(&x_full[buffer]);
            if (lane == 0) {
                barrier_wait(shared_address(&x_empty[buffer]), parity);
                barrier_arrive_expect(barrier, item.z * args.columns * 2);
            }
            __syncwarp();
            if (lane < item.z) {
                const int row = item.y + lane;
                const long long from = args.slots ? args.order[row] / args.slots : row;
                copy_bulk(x_at + (buffer * args.item_rows + lane) * stride, args.x + from * args.columns, args.columns * 2,
                          barrier);
            }
            if (++buffer == args.buffers) buffer = 0, parity ^= 1;
        }
    } else {
        const int pair = warp / PARTS, part = warp % PARTS;
        const int inner = pair / 2, half = pair % 2;  // group of the tile, and which 32 of its rows
        const int whole = args.columns / 64, rest = args.columns % 64 / 16;
        const int mine = (whole - part + PARTS - 1) / PARTS;  // whole blocks of a tile that are this warp's
        const uint32_t x_lane = x_at + lane % 8 * stride + lane / 8 * 16 + part * 128;
        const uint32_t x_buffer = kept(args.item_rows * stride);
        // From a row to the eighth behind it, or to the last that there is room for.
        const uint32_t x_eight = kept((min(lane % 8 + 8, args.item_rows - 1) - lane % 8) * stride);
        const uint32_t codes_lane = kept(ring + inner * PARTS * 2048 + half * 1024 + lane * 16);
        const uint32_t scales_lane = kept(ring + kStageCodes + (inner * PARTS + part) / F::kBlocks * kBytes +
                                          lane / 4 * 4 * F::kTileScales + half * 2 * F::kTileScales);
        const bool leader = kept(lane) == 0;
        int slot = 0, buffer = 0, index = begin / tiles, tile = begin - index * tiles;
        uint32_t parity = 0, x_parity = 0;
        bool fresh = true, few = true;
        for (int at = begin; at < end; ++at) {
            const int width = min(4, tiles16 - 4 * (tile * kGroups + inner));  // of the group; none if negative
            const int here = 2 * half < width ? mine : 0;
            if (fresh) {
                barrier_wait(shared_address(&x_full[buffer]), x_parity);
                few = NB == 1 || args.items[index].z <= 8;
            }
            fresh = tile == tiles - 1 || at == end - 1;  // the item's last tile here
            uint32_t x = x_lane + buffer * x_buffer;
            const uint32_t codes_part = kept(codes_lane + part * width * 512);
            float acc[2][NB][4] = {};
            int s = 0;
            // Beyond the last tile this reads other bytes of the ring and makes sums that nobody reads.
            if (few) {
                for (; s < here; ++s) {
                    barrier_wait(full_at + 8 * slot, parity);
                    multiply_block<F, 1>(acc, codes_part + slot * kStage<F>, scales_lane + slot * kStage<F>, x, x_eight,
                                         empty_at + 8 * slot, leader);
                    x += PARTS * 128;
                    if (++slot == args.stages) slot = 0, parity ^= 1;
                }
            } else {
                for (; s < here; ++s) {
                    barrier_wait(full_at + 8 * slot, parity);
                    multiply_block<F, NB>(acc, codes_part + slot * kStage<F>, scales_lane + slot * kStage<F>, x,
                                          x_eight, empty_at + 8 * slot, leader);
                    x += PARTS * 128;
                    if (++slot == args.stages) slot = 0, parity ^= 1;
                }
            }
            for (; s < stages_of_tile; ++s) {
                barrier_wait(full_at + 8 * slot, parity);
                if (s * PARTS + part == whole && rest && 2 * half < width) {
                    const uint32_t codes = codes_lane + slot * kStage<F> + part * width * 512 - half * 1024 - lane * 12;
                    multiply_rest<F>(acc, codes + half * rest * 256, scales_lane + slot * kStage<F>, x, x_eight, rest,
                                     width - 2 * half);
                }
                __syncwarp();
                if (leader) barrier_arrive(empty_at + 8 * slot);
                if (++slot == args.stages) slot = 0, parity ^= 1;
            }
            if (fresh) {
                if (leader) barrier_arrive(shared_address(&x_empty[buffer]));
                if (++buffer == args.buffers) buffer = 0, x_parity ^= 1;
            }
            // The parts' sums, added in order by some of the warps, which take turns.
            float4* partial = reinterpret_cast<float4*>(memory) + lane;
            constexpr int kPieces = 32 / PARTS * NB;  // 16 rows by 8 columns each
            named_barrier(1, kConsumers * 32);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int n = 0; n < NB; ++n) {
                    const float* c = acc[i][n];
                    partial[(part * kPieces + (pair * 2 + i) * NB + n) * 32] = make_float4(c[0], c[1], c[2], c[3]);
                }
            }
            named_barrier(2, kConsumers * 32);
            for (int piece = (warp + at * kPieces) % kConsumers; piece < kPieces; piece += kConsumers) {
                const int tile16 = tile * kGroups * 4 + piece / NB;
                if (tile16 >= tiles16) break;
                float4 sum = partial[piece * 32];
#pragma unroll
                for (int p = 1; p < PARTS; ++p) {
                    const float4 more = partial[(p * kPieces + piece) * 32];
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                finish<F, MATRIX>(args, sum, args.items[index], tile16, piece % NB * 8, lane);
            }
            if (++tile == tiles) tile = 0, ++index;
        }
    }
}

}  // namespace polymoe

#define POLYMOE_DECODE(NAME, FORMAT, NB, PARTS, MATRIX)                                       \
    extern "C" __global__ void __launch_bounds__(polymoe::kWarps * 32, 1)                     \
        NAME(const __grid_constant__ polymoe::GemmArgs args) {                                \
        polymoe::decode_gemm<polymoe::FORMAT, NB, PARTS, polymoe::MATRIX>(args);              \
    }

#define POLYMOE_DECODE_SIZES(KIND, FORMAT, MATRIX)              \
    POLYMOE_DECODE(decode_##KIND##_8_64, FORMAT, 1, 8, MATRIX)  \
    POLYMOE_DECODE(decode_##KIND##_8_128, FORMAT, 1, 4, MATRIX) \
    POLYMOE_DECODE(decode_##KIND##_16_64, FORMAT, 2, 8, MATRIX) \
    POLYMOE_DECODE(decode_##KIND##_16_128, FORMAT, 2, 4, MATRIX)

#define POLYMOE_DECODE_ALL(FORMAT)              \
    POLYMOE_DECODE_SIZES(gated, FORMAT, kGated) \
    POLYMOE_DECODE_SIZES(plain, FORMAT, kPlain) \
    POLYMOE_DECODE_SIZES(down, FORMAT, kDown)
