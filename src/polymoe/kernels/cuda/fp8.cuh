// Products of e4m3 weights, with scales for 128 x 128, and e4m3 rows, with scales for 128 columns.
//
// The matrix units add products of e4m3 with 14 bits, which is not enough: h is rounded to e4m3 afterwards, and numbers
// near a tie would go the other way. So both sides become float16, which holds every e4m3 number, and the units add in
// float32: 128 columns at a time, and each such sum is multiplied by both scales and added in float32 again.
//
// One block a multiprocessor walks over (item, 256 rows of weights) tiles. An item is one expert with up to MOST of the
// rows that chose it. One thread keeps a ring of weights filled; three warps bring rows of x from wherever they are,
// convert them and put them beside the weights; two warpgroups convert weights in registers and multiply, and add one
// group's sums while the next one's products run.
//
// A row of x is its codes and behind them its scales (row_bytes). `up` writes h in the same form: 128 columns of it are
// 256 rows of weights, gate and up in turns, which is what a block has; its warps tell each other the largest. Where
// weights lie is described in layouts/hopper_bytes.py.
#pragma once
#include "e4m3.cuh"
#include "fp8_blocks.cuh"
#include "whole.cuh"

namespace polymoe {
namespace fp8 {

constexpr int kBringers = 3;  // warps that bring x

// A stage: 128 columns of the tile's weights, of x in float16 in two tiles of 64 columns, and for each two rows of x
// four scales: both rows' times the weights' first, then times their second.
template <int MOST>
struct Stage {
    static constexpr int kX = kTileBytes, kHalf = MOST * 128, kScales = kX + 2 * kHalf;
    static constexpr int kBytes = (kScales + MOST * 8 + 1023) / 1024 * 1024;
};

// All of K for the groups of this warpgroup and N of the item's rows.
template <int N, int MOST, int MATRIX>
struct Multiply {
    using Shape = Stage<MOST>;
    static constexpr int kSums = N <= 64 ? kGroups : 1;  // as many as registers have room for
    float (&acc)[kGroups][MOST / 2];
    Ring& ring;
    uint32_t lane_weights, lane_scales;
    float sums[kSums][N / 2];
    uint32_t words[4][4];
    uint32_t a[2][2][4];  // two sets take turns: one is read by products while the other is written

    __device__ __forceinline__ Multiply(float (&acc)[kGroups][MOST / 2], Ring& ring) : acc(acc), ring(ring) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
        lane_weights = kept(warpgroup * kGroups * kGroupBytes + warp % 4 * 2048 + lane * 16);
        lane_scales = kept(Shape::kScales + lane % 4 * 16 + (MATRIX == kDown ? warpgroup * 8 : 0));
    }

    // The codes of a group, 32 columns after the other.
    __device__ __forceinline__ void load(uint32_t stage, int m) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const uint4 v = load_shared_16(stage + lane_weights + m * kGroupBytes + part * 512);
            words[part][0] = v.x, words[part][1] = v.y, words[part][2] = v.z, words[part][3] = v.w;
        }
    }

    __device__ __forceinline__ void convert(int part) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t& to = a[part % 2][i / 4][i % 4];
            to = i % 2 ? high_codes(words[part][i / 2]) : low_codes(words[part][i / 2]);
            made_here(to);
        }
    }

    __device__ __forceinline__ void products(uint32_t stage, int m, int part) {
        products_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint64_t x = describe_units(
                in_units(stage) + (Shape::kX + part / 2 * Shape::kHalf) / 16 + part % 2 * 4 + step * 2);
            if (part == 0 && step == 0) {
                Product<N>::set_float16(sums[m % kSums], a[part % 2][step], x);
            } else {
                Product<N>::add_float16(sums[m % kSums], a[part % 2][step], x);
            }
        }
        products_commit();
    }

    // The sums of a group times the stage's scales.
    __device__ __forceinline__ void add(uint32_t stage, int m) {
        const float* from = sums[m % kSums];
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
            float scales[4];
            if (MATRIX == kDown) {
                const uint2 v = load_shared_8(stage + lane_scales + n * 64);
                scales[0] = scales[2] = __uint_as_float(v.x), scales[1] = scales[3] = __uint_as_float(v.y);
            } else {
                const uint4 v = load_shared_16(stage + lane_scales + n * 64);
                scales[0] = __uint_as_float(v.x), scales[1] = __uint_as_float(v.y);
                scales[2] = __uint_as_float(v.z), scales[3] = __uint_as_float(v.w);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][4 * n + i] += from[4 * n + i] * scales[i];
        }
    }

    __device__ __forceinline__ void run(int blocks) {
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[m][i] = 0.0f;
        }
        uint32_t stage = ring.wait();
        load(stage, 0);
        convert(0);
        for (int left = blocks; left > 0; --left) {
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    products(stage, m, part);
                    products_wait<1>();  // what was in front of them is done
                    if (kSums > 1 && part == 0 && m > 0) add(stage, m - 1);
                    if (part < 3) {
                        convert(part + 1);
                    } else if (m + 1 < kGroups) {
                        load(stage, m + 1);
                        convert(0);
                        if (kSums == 1) {
                            products_wait<0>();
                            add(stage, m);
                        }
                    }
                }
            }
            products_wait<0>();
            add(stage, kGroups - 1);
            barrier_arrive(ring.empty + 8 * ring.slot);
            ring.next();
            if (left > 1) {
                stage = ring.wait();
                load(stage, 0);
                convert(0);
            }
        }
    }
};

// In products of N or, where the item has more rows, of the next of MORE.
template <int MOST, int MATRIX, int N, int... MORE>
__device__ __forceinline__ void multiply_rows(float (&acc)[kGroups][MOST / 2], Ring& ring, int blocks, int rows) {
    if constexpr (sizeof...(MORE) > 0) {
        if (rows > N) return multiply_rows<MOST, MATRIX, MORE...>(acc, ring, blocks, rows);
    }
    Multiply<N, MOST, MATRIX>(acc, ring).run(blocks);
}

// What a block's warps tell each other of the rows of h.
template <int MOST>
struct Largest {
    float of_warp[kWarps][MOST];
    float2 scale[MOST];  // and what it is to be divided by
};

// v / scale, rounded once; `inverse` is 1 / scale.
__device__ __forceinline__ float divided(float v, float scale, float inverse) {
    const float q = v * inverse;
    return fmaf(fmaf(-q, scale, v), inverse, q);
}

// h of a group's rows g, in place of the first half of their sums, and the largest of each row of x in this warp.
template <bool SWIGLU, int MOST>
__device__ __forceinline__ void activate(
    const GemmArgs& args, float (&acc)[kGroups][MOST / 2], int rows, int bias, float (&largest)[MOST]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float low_bias[kGroups], high_bias[kGroups];
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
        low_bias[m] = load_bias(args.bias, args.bias_dtype, bias + m * 32);
        high_bias[m] = load_bias(args.up_bias, args.bias_dtype, bias + m * 32);
    }
#pragma unroll
    for (int n = 0; n < MOST / 8; ++n) {
        if (n * 8 >= rows) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = 0.0f;
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
                float* c = &acc[m][4 * n + i];
                const float gate = c[0] + low_bias[m], up = c[2] + high_bias[m];
                *c = SWIGLU ? swiglu(args, gate, up) : gated(args, gate, up);
                most = fmaxf(most, fabsf(*c));
            }
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
            if (g == 0) largest[n * 8 + 2 * t + i] = most;
        }
    }
}

// The activation, and 128 columns of h with their scales.
template <int MOST>
__device__ __forceinline__ void write_h(
    const GemmArgs& args, float (&acc)[kGroups][MOST / 2], int4 item, int tile, Largest<MOST>& largest) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, columns = args.rows / 2;
    const int first = warp / 4 * kGroups * 32 + warp % 4 * 8;  // of the 128 columns, those of m = 0; 32 further on of 1
    const int bias = item.x * columns + tile * 128 + first + g;
    if (args.activation == 0) {
        activate<true, MOST>(args, acc, item.z, bias, largest.of_warp[warp]);
    } else {
        activate<false, MOST>(args, acc, item.z, bias, largest.of_warp[warp]);
    }
    named_barrier(1, kWarps * 32);
    const int bytes = row_bytes(columns);
    uint8_t* out = static_cast<uint8_t*>(args.out) + static_cast<long long>(item.y) * bytes;
    if (threadIdx.x < item.z) {
        float scale = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) scale = fmaxf(scale, largest.of_warp[other][threadIdx.x]);
        scale /= 448.0f;
        if (scale == 0.0f) scale = 1.0f;
        largest.scale[threadIdx.x] = make_float2(scale, fminf(1.0f / scale, 3.4028235e38f));
        reinterpret_cast<float*>(out + static_cast<long long>(threadIdx.x) * bytes + columns)[tile] = scale;
    }
    named_barrier(1, kWarps * 32);
    out += static_cast<long long>(g) * bytes + tile * 128 + first + 2 * t;
#pragma unroll
    for (int n = 0; n < MOST / 8; ++n) {
        if (n * 8 >= item.z) break;
        uint32_t v = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 scale = largest.scale[n * 8 + 2 * t + i];
            v |= pack_e4m3(divided(acc[0][4 * n + i], scale.x, scale.y), divided(acc[1][4 * n + i], scale.x, scale.y))
                 << 16 * i;
        }
        v = transposed(v);  // now a row's columns 2t and 2t + 1, each of m = 0 and 1
        if (n * 8 + g < item.z) {
            uint16_t* to = reinterpret_cast<uint16_t*>(out + static_cast<long long>(n * 8) * bytes);
            to[0] = static_cast<uint16_t>((v & 0xFF) | (v >> 8 & 0xFF00));
            to[16] = static_cast<uint16_t>((v >> 8 & 0xFF) | (v >> 16 & 0xFF00));
        }
    }
}

// What warps that multiply do with `total` tiles.
template <int MOST, int MATRIX, int... WIDTHS>
__device__ __forceinline__ void work(const GemmArgs& args, Ring& ring, Largest<MOST>& largest, int total, int tiles) {
    const int warp = threadIdx.x / 32, groups = args.rows / 64;
    float acc[kGroups][MOST / 2];
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const int index = at / tiles, tile = at - index * tiles;
        int4 item = args.items[index];
        item.z = of_warp(item.z);
        multiply_rows<MOST, MATRIX, WIDTHS..., MOST>(acc, ring, args.columns / 128, item.z);
        if (MATRIX == kGated) {
            write_h<MOST>(args, acc, item, tile, largest);
        } else {
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
                const int group = (tile * kWarpgroups + warp / 4) * kGroups + m;
                if (group < groups) write_y<MOST>(args, acc[m], item, group);
            }
        }
    }
}

// One thread: all weights of the tiles, 128 columns after the other.
template <int MOST>
__device__ __forceinline__ void bring_weights(const GemmArgs& args, Ring& ring, int total, int tiles) {
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const int index = at / tiles, tile = at - index * tiles;
        const uint32_t bytes = min(kTileBytes, args.rows * 128 - tile * kTileBytes);
        const uint8_t* codes = args.codes + args.items[index].x * args.codes_expert + 256LL * tile * args.columns;
        for (int block = 0; block < args.columns / 128; ++block) {
            const uint32_t barrier = ring.full + 8 * ring.slot;
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity);
            barrier_arrive_expect(barrier, bytes);
            copy_weights<MOST>(ring.data + ring.slot * ring.stage_bytes, codes, bytes, barrier);
            codes += bytes;
            ring.next();
        }
    }
}

// Three warps: x of the tiles, 128 columns after the other, all together or, for few rows, each a stage in turn. Eight lanes
// have a row, 16 columns each, and the next row kAtOnce further on; each of them has the scale of one of their rows. While
// a stage is not free yet, what will be put there is on its way to registers.
template <int MOST, int MATRIX>
struct Bring {
    using Shape = Stage<MOST>;
    static constexpr uint32_t kNone = 0xFFFFFFFFu;
    static constexpr int kTogether = MOST <= 32 ? 1 : kBringers, kTurns = kBringers / kTogether;
    static constexpr int kAtOnce = kTogether * 4, kTimes = (MOST + kAtOnce - 1) / kAtOnce;
    static_assert(kTimes <= 8 && kAtOnce % 8 == 4);
    const GemmArgs& args;
    Ring& ring;
    const int turn, first, piece;  // of the stages; of the item's rows; of a row's 128 columns
    const uint32_t units;    // of 16 bytes in a row
    const uint32_t place;    // of the first row's piece in shared memory
    uint32_t from[kTimes];   // the item's rows, in units; or kNone
    uint32_t scale_from;
    WeightScales of_weights;
    uint4 codes[kTimes];
    float scale, weights[2];

    __device__ __forceinline__ Bring(const GemmArgs& args, Ring& ring, int thread)
        : args(args), ring(ring), turn(thread / (kTogether * 32)), first(thread / 8 % kAtOnce), piece(thread % 8),
          units(row_bytes(args.columns) / 16),
          place(kept(Shape::kX + piece / 4 * Shape::kHalf + first * 128 + ((piece % 4 * 2) ^ (first % 8)) * 16)) {}

    __device__ __forceinline__ uint32_t source(int4 item, int row) const {
        if (row >= item.z) return kNone;
        return (MATRIX == kDown ? item.y + row : args.order[item.y + row] / args.slots) * units;
    }

    __device__ __forceinline__ void find(int at, int tiles) {
        const int index = at / tiles;
        const int4 item = args.items[index];
        of_weights = WeightScales::of<MATRIX>(args, item.x, at - index * tiles);
#pragma unroll
        for (int i = 0; i < kTimes; ++i) from[i] = source(item, first + i * kAtOnce);
        scale_from = source(item, first + piece * kAtOnce);
    }

    __device__ __forceinline__ void fetch(int block, int i) {
        const uint4* x = reinterpret_cast<const uint4*>(args.x) + block * 8 + piece;
        codes[i] = load_16_if(from[i] != kNone, x + kept(from[i]));
    }

    __device__ __forceinline__ void fetch_scales(int block) {
        if (scale_from == kNone) return;
        scale = reinterpret_cast<const float*>(reinterpret_cast<const uint4*>(args.x) + scale_from + args.columns / 16)[block];
        weights[0] = of_weights.first[block], weights[1] = of_weights.second[block];
    }

    // Puts what is here into the stage, and fetches what comes next of the same tile, if anything does.
    __device__ __forceinline__ void put(int next) {
        const uint32_t stage = ring.data + ring.slot * ring.stage_bytes;
        if (scale_from != kNone) {
            const int row = first + piece * kAtOnce;
            const uint32_t to = stage + Shape::kScales + row / 2 * 16 + row % 2 * 4;
            store_shared_4(to, __float_as_uint(scale * weights[0]));
            store_shared_4(to + 8, __float_as_uint(scale * weights[1]));
        }
        if (next) fetch_scales(next);
#pragma unroll
        for (int i = 0; i < kTimes; ++i) {
            if (from[i] == kNone) continue;
            // kAtOnce rows further on, swizzling has another of its third bits.
            const uint32_t to = ((stage + place) ^ (i % 2 * 64)) + i * kAtOnce * 128;
            const uint4 v = codes[i];
            store_shared_16(to, make_uint4(low_codes(v.x), high_codes(v.x), low_codes(v.y), high_codes(v.y)));
            store_shared_16(to ^ 16, make_uint4(low_codes(v.z), high_codes(v.z), low_codes(v.w), high_codes(v.w)));
            if (next) fetch(next, i);
        }
        shared_for_copies_and_products();
        barrier_arrive(ring.full + 8 * ring.slot);
    }

    __device__ __forceinline__ void run(int total, int tiles) {
        const int blocks = args.columns / 128;
        for (int i = 0; i < turn; ++i) ring.next();
        int block = turn;
        for (int at = blockIdx.x; at < total; at += gridDim.x, block -= blocks) {
            if (block >= blocks) continue;
            find(at, tiles);
            fetch_scales(block);
#pragma unroll
            for (int i = 0; i < kTimes; ++i) fetch(block, i);
#pragma unroll 1
            for (; block < blocks; block += kTurns) {
                barrier_wait(ring.empty + 8 * ring.slot, ring.parity);
                put(block + kTurns < blocks ? block + kTurns : 0);
#pragma unroll
                for (int i = 0; i < kTurns; ++i) ring.next();
            }
        }
    }
};

}  // namespace fp8

// Tiles of 256 rows of weights by up to MOST rows of x, in products of MOST or, if that is enough, one of the smaller
// WIDTHS.
template <int MATRIX, int MOST, int... WIDTHS>
__device__ __forceinline__ void fp8_gemm(const GemmArgs& args) {
    using namespace fp8;
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMostStages];
    __shared__ __align__(16) Largest<MOST> largest;
    const int warp = of_warp(threadIdx.x / 32);
    Ring ring = ring_at(args, memory, barriers, fp8::Stage<MOST>::kBytes);
    if (threadIdx.x == 0) {
        init_barriers(args, ring, 1 + 32 * fp8::Bring<MOST, MATRIX>::kTogether, kWarps * 32);
        barrier_init_visible();
    }
    __syncthreads();
    // Items were complete before the kernel in front of `down` let it start; x was not.
    if (MATRIX != kDown) {
        wait_for_previous_kernel();
        let_next_kernel_start();
    }
    const int tiles = (args.rows + 255) / 256, total = of_warp(*args.count) * tiles;

    if (warp >= kWarps) {
        fewer_registers<88>();
        ring.parity = 1;
        if (warp == kWarps) {
            if (threadIdx.x % 32 == 0) bring_weights<MOST>(args, ring, total, tiles);
        } else {
            if (MATRIX == kDown) {
                wait_for_previous_kernel();
                let_next_kernel_start();
            }
            fp8::Bring<MOST, MATRIX>(args, ring, threadIdx.x - (kWarps + 1) * 32).run(total, tiles);
        }
    } else {
        more_registers<208>();
        ring.parity = 0;
        fp8::work<MOST, MATRIX, WIDTHS...>(args, ring, largest, total, tiles);
    }
}

}  // namespace polymoe

#define POLYMOE_FP8(NAME, MATRIX, ...)                                        \
    extern "C" __global__ void __launch_bounds__(polymoe::fp8::kThreads, 1)   \
        NAME(const __grid_constant__ polymoe::GemmArgs args) {                \
        polymoe::fp8_gemm<polymoe::MATRIX, __VA_ARGS__>(args);               \
    }

// By the most rows of x of an item. The same numbers stand in launch_fp8.py.
#define POLYMOE_FP8_SIZES(KIND, MATRIX)           \
    POLYMOE_FP8(fp8_##KIND##_32, MATRIX, 32, 16)  \
    POLYMOE_FP8(fp8_##KIND##_64, MATRIX, 64, 32, 48)  \
    POLYMOE_FP8(fp8_##KIND##_96, MATRIX, 96, 48, 64, 80)
