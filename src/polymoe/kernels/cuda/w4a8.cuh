// 4-bit weights and rows of e4m3, for any number of rows: products of the matrix units (wgmma), weights as the left operand
// in registers.
//
// A weight is a code times its group's scale; what the scale is below the largest of its row, a power of two, is part of the
// decoded weight, and the row's largest multiplies the result. So nothing but x's scales comes between the products: the
// matrix units, which add e4m3 products with 14 bits, add up 128 columns, and such sums are multiplied by x's scales and
// added in float32. Where weights lie is described in layouts/hopper_e4m3.py.
//
// x comes in tiles, as `quantize` in rows_fp8.cu and this kernel's own epilogue write them: for each item, for each 128
// columns, its rows of 128 bytes, swizzled, with room for a multiple of 8 rows, then the float32 scales, in the same order.
// An item is one expert with up to MOST of the rows that chose it. y is in expert order.
#pragma once
#include "e4m3.cuh"
#include "packed.cuh"
#include "wgmma.cuh"

namespace polymoe {

// e2m1 codes with scales as places in the table of magnitudes: for each of 64 columns' two groups, rows g and g + 8.
struct Mxfp4E4m3 {
    static constexpr int kTileScales = 4, kBlocks = 1;
    static constexpr bool kRowScales = true;  // which multiply a row's sums
    static constexpr int kSecondHalf = 8, kPair = 2;  // where the second 8 of 16 columns of h begin; from pair to pair
};

constexpr int kMagnitudes = 16;

// The eight magnitudes of e2m1 times 2^-step, as bytes of e4m3 that hold 2^6 times as much; zeros for a step of 15.
__device__ __forceinline__ uint64_t magnitudes(int step) {
    uint64_t bytes = 0;
    for (int i = 1; i < 8 && step < 15; ++i) {
        const int halves = i < 4 ? i : i == 7 ? 12 : 2 * i - 4;
        const int units = halves << (14 - step), top = 31 - __clz(units);  // of 2^-9, the least that e4m3 holds
        bytes |= static_cast<uint64_t>(top < 3 ? units : (top - 2) * 8 + (units >> (top - 3)) - 8) << 8 * i;
    }
    return bytes;
}

// Eight codes of a row: columns 4t to 4t + 3, and those 16 further on. 7 instructions.
__device__ __forceinline__ void decode_e2m1(uint32_t& first, uint32_t& second, uint32_t word, uint2 magnitudes) {
    const uint32_t which = word & 0x77777777u;
    first = bytes_of(magnitudes, which) | ((word << 4) & 0x80808080u);
    second = bytes_of(magnitudes, which >> 16) | (word & 0x80808080u);
}

// Two warpgroups take turns at the matrix units: by themselves they come to decode and to multiply at the same time. (Of
// four, some always do the other.)
struct Turns {
    uint32_t mine, next;  // barriers
    uint32_t parity;

    __device__ __forceinline__ void wait() {
        barrier_wait(mine, parity);
        parity ^= 1;
    }

    __device__ __forceinline__ void pass_on() const {
        if (threadIdx.x % 32 == 0) barrier_arrive(next);
    }
};

// All of K for MT groups of 64 rows of this warpgroup and the item's rows, one chain of products of 128 columns after the
// other: while those of one warpgroup run, the others decode.
template <int WG, int MT, int MOST, int BLOCKS>
struct MultiplyE4m3 {
    static constexpr bool kTurns = MOST > 64;
    using Shape = Stage<Mxfp4E4m3, E4m3Rows, WG * MT, MOST, BLOCKS>;
    float (&acc)[MT][MOST / 2];
    Ring& ring;
    Turns& turns;
    uint32_t lane_codes, lane_scales, lane_x, table;
    uint32_t x_step, x_scale_step;  // from 128 columns of x to the next, in units of 16 bytes and in bytes
    int columns;
    uint32_t words[4], places;
    uint32_t a[4][4];

    __device__ __forceinline__ MultiplyE4m3(
        float (&acc)[MT][MOST / 2], const GemmArgs& args, Ring& ring, Turns& turns, int rows, uint32_t table)
        : acc(acc), ring(ring), turns(turns), table(table), columns(args.columns) {
        const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 % 4, group = threadIdx.x / 128 * MT;
        lane_codes = kept(Shape::kCodes + group * Shape::kGroupCodes + tile * 512 + lane * 16);
        lane_scales = kept(Shape::kScales + group * Shape::kGroupScales + (lane / 4 * 4 + tile) * 4);
        lane_x = kept(Shape::kXScales + lane % 4 * 8);
        x_step = padded_rows(rows) * 8, x_scale_step = padded_rows(rows) * 4;
    }

    // Codes and scales of 64 columns. Where a group has no such tile, these are other bytes, but places in the table.
    __device__ __forceinline__ void load(uint32_t stage, int m, int block) {
        const uint4 w = load_shared_16(stage + lane_codes + m * Shape::kGroupCodes + block * 2048);
        words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
        places = load_shared_4(stage + lane_scales + m * Shape::kGroupScales + block * 128) & 0x78787878u;
    }

    // Half of them to a[TO].
    template <int TO, int HALF>
    __device__ __forceinline__ void convert() {
        const uint2 low = load_shared_8(table + byte_of<HALF * 2>(places));  // row g
        const uint2 high = load_shared_8(table + byte_of<HALF * 2 + 1>(places));
        decode_e2m1(a[TO][0], a[TO][2], words[HALF * 2], low);
        decode_e2m1(a[TO][1], a[TO][3], words[HALF * 2 + 1], high);
#pragma unroll
        for (int i = 0; i < 4; ++i) made_here(a[TO][i]);
    }

    // 128 columns of a group, or the last 64, decoded and multiplied, and the sums times x's scales added up.
    template <int N, bool WHOLE>
    __device__ __forceinline__ void chain(float (&acc)[MOST / 2], uint32_t stage, int m, int tile) {
        const uint32_t x = in_units(stage) + tile * x_step, x_scales = stage + lane_x + tile * x_scale_step;
        float sum[N / 2];
        load(stage, m, tile * 2);
        convert<0, 0>();
        convert<1, 1>();
        if constexpr (WHOLE) {
            load(stage, m, tile * 2 + 1);
            convert<2, 0>();
            convert<3, 1>();
        }
        if (kTurns) turns.wait();
        products_fence();
        Product<N>::set_e4m3(sum, a[0], describe_units(x));
#pragma unroll
        for (int step = 1; step < (WHOLE ? 4 : 2); ++step) {
            Product<N>::add_e4m3(sum, a[step], describe_units(x + step * 2));
        }
        products_commit();
        products_wait<0>();
        if (kTurns) turns.pass_on();
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
            const uint2 scale = load_shared_8(x_scales + n * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                made_here(sum[4 * n + i]);
                acc[4 * n + i] = fmaf(sum[4 * n + i], __uint_as_float(i % 2 ? scale.y : scale.x), acc[4 * n + i]);
            }
        }
    }

    __device__ __forceinline__ void give_back() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * ring.slot);
        ring.next();
    }

    // All whole stages.
    template <int N>
    __device__ __forceinline__ void run(int stages) {
        for (int left = stages; left > 0; --left) {
            const uint32_t stage = ring.wait();
#pragma unroll
            for (int m = 0; m < MT; ++m) {
#pragma unroll
                for (int tile = 0; tile < BLOCKS / 2; ++tile) chain<N, true>(acc[m], stage, m, tile);
            }
            give_back();
        }
    }

    // The last stage where it is not a whole one, all rows that an item may have.
    __device__ __forceinline__ void rest(int blocks) {
        const uint32_t stage = ring.wait();
        for (int tile = 0; tile * 2 < blocks; ++tile) {
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                if (tile * 2 + 1 < blocks) {
                    chain<MOST, true>(acc[m], stage, m, tile);
                } else {
                    chain<MOST, false>(acc[m], stage, m, tile);
                }
            }
        }
        give_back();
    }

    // In products of N or, where the item has more rows, of the next of MORE.
    template <int N, int... MORE>
    __device__ __forceinline__ void run_narrowest(int stages, int rows) {
        if constexpr (sizeof...(MORE) > 0) {
            if (rows > N) return run_narrowest<MORE...>(stages, rows);
        }
        run<N>(stages);
    }

    template <int... WIDTHS>
    __device__ __forceinline__ void run_all(int rows) {
        const int stages = columns / (64 * BLOCKS), blocks = columns / 64 - stages * BLOCKS;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int i = 0; i < MOST / 2; ++i) acc[m][i] = 0.0f;
        }
        if (stages) run_narrowest<WIDTHS..., MOST>(stages, rows);
        if (blocks) rest(blocks);
    }
};

// What the sums of a row of weights are multiplied by: 2^-6 from the magnitudes, the row's largest scale, the expert's.
__device__ __forceinline__ float scale_of_row(const uint8_t* largest, const float* scale, int expert) {
    const uint32_t exponent = *largest;
    const float power = __uint_as_float(exponent ? exponent << 23 : 1u << 22);
    return power * (scale ? 0.015625f * scale[expert] : 0.015625f);
}

// The largest of the lanes 4g + t for each t, of COUNT numbers: in halves as long as there are halves, so that a lane then
// has `numbers_left` of them. Returns the first one's place.
template <int COUNT, int LANES>
__device__ __forceinline__ int largest_of_lanes(float* numbers) {
    if constexpr (LANES == 32) {
        return 0;
    } else if constexpr (COUNT % 2 == 0) {
        const bool upper = threadIdx.x & LANES;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float mine = upper ? numbers[i + COUNT / 2] : numbers[i];
            const float theirs = upper ? numbers[i] : numbers[i + COUNT / 2];
            numbers[i] = greater(mine, __shfl_xor_sync(0xFFFFFFFFu, theirs, LANES));
        }
        return (upper ? COUNT / 2 : 0) + largest_of_lanes<COUNT / 2, LANES * 2>(numbers);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            numbers[i] = greater(numbers[i], __shfl_xor_sync(0xFFFFFFFFu, numbers[i], LANES));
        }
        return largest_of_lanes<COUNT, LANES * 2>(numbers);
    }
}

__host__ __device__ constexpr int numbers_left(int count) {
    for (int lanes = 4; lanes < 32 && count % 2 == 0; lanes *= 2) count /= 2;
    return count;
}

// The activation, and 128 columns of h in e4m3. `group`: the block's first of 64 rows of weights. `largest`: [3, MOST] in
// shared memory, at first zeros; `turn` says which of the three this is.
template <int WG, int MT, int MOST, class F = Mxfp4E4m3>
__device__ __forceinline__ void write_h(
    const GemmArgs& args, float (&acc)[MT][MOST / 2], int4 item, int group, const uint8_t* scales, float* largest, int turn) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, tiles16 = args.rows / 16;
    const int first = (group + warp / 4 * MT) * 4 + warp % 4;  // tile of 16 rows of weights, 8 columns of h
    const int width = args.rows / 2;
    float most[MOST / 4] = {};  // of rows 2t and 2t + 1 of each 8
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        const int tile16 = first + m * 4;
        if (tile16 >= tiles16) break;
        const long long bias = static_cast<long long>(item.x) * width + tile16 * 8 + g;
        const float gate_scale = F::kRowScales ? scale_of_row(scales + tile16 * 16 + g, args.scale, item.x) : 1.0f;
        const float up_scale = F::kRowScales ? scale_of_row(scales + tile16 * 16 + 8 + g, args.up_scale, item.x) : 1.0f;
        const float gate_bias = load_bias(args.bias, args.bias_dtype, bias);
        const float up_bias = load_bias(args.up_bias, args.bias_dtype, bias);
        if (args.activation == 0) {
#pragma unroll
            for (int n = 0; n < MOST / 8; ++n) {
                if (n * 8 >= item.z) break;
                float* c = &acc[m][4 * n];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    c[i] = swiglu(args, c[i] * gate_scale + gate_bias, c[2 + i] * up_scale + up_bias);
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < MOST / 8; ++n) {
                if (n * 8 >= item.z) break;
                float* c = &acc[m][4 * n];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    c[i] = gated(args, c[i] * gate_scale + gate_bias, c[2 + i] * up_scale + up_bias);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < MOST / 4; ++i) most[i] = greater(most[i], fabsf(acc[m][i / 2 * 4 + i % 2]));
    }
    float* mine = largest + turn * MOST;
    const int at = largest_of_lanes<MOST / 4, 4>(most);
#pragma unroll
    for (int i = 0; i < numbers_left(MOST / 4); ++i) {  // positive numbers are in the order of their bits
        atomicMax(reinterpret_cast<uint32_t*>(mine) + (at + i) / 2 * 8 + 2 * t + (at + i) % 2, __float_as_uint(most[i]));
    }
    named_barrier(1, WG * 128);
    // Everybody has read the one before, which comes next but one.
    if (threadIdx.x < MOST) largest[(turn + 2) % 3 * MOST + threadIdx.x] = 0.0f;
    const int padded = padded_rows(item.z), blocks = (width + 127) / 128;
    uint8_t* out = static_cast<uint8_t*>(args.out) + static_cast<long long>(item.w) * blocks * 132;
    if (threadIdx.x < item.z) {
        const float scale = mine[threadIdx.x] / 448.0f;
        reinterpret_cast<float*>(out + blocks * padded * 128)[group / 4 * padded + threadIdx.x] = scale == 0.0f ? 1.0f : scale;
    }
    out += group / 4 * padded * 128 + g * 128;
#pragma unroll
    for (int n = 0; n < MOST / 8; ++n) {
        if (n * 8 >= item.z) break;
        float per[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float most_of_row = mine[n * 8 + 2 * t + i];
            per[i] = most_of_row == 0.0f ? 0.0f : quotient(448.0f, most_of_row);
        }
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const float* c = &acc[m][4 * n];
            const uint32_t codes = pack_e4m3(c[0] * per[0], c[1] * per[1]);
            // Now row g's columns 2t and 2t + 1 of the tile.
            const uint32_t pair = transposed((codes & 0xFF) | (codes & 0xFF00) << 8);
            const int inner = (first + m * 4) % 16, chunk = (inner / 2) ^ g;
            if (n * 8 + g >= item.z || first + m * 4 >= tiles16) continue;
            *reinterpret_cast<uint16_t*>(out + n * 1024 + chunk * 16 + inner % 2 * F::kSecondHalf + F::kPair * t) =
                static_cast<uint16_t>(bytes_of(make_uint2(pair, 0), 0x4420));
        }
    }
}

// MT groups of 64 rows for each of WG warpgroups, 256 rows together, by up to MOST rows of x, in products of MOST or, if
// that is enough, one of the smaller WIDTHS. Each width takes registers of its own.
template <int MATRIX, int WG, int MT, int BLOCKS, int MOST, int... WIDTHS>
__device__ __forceinline__ void w4a8_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMostStages], turns_of[WG];
    static_assert(WG * MT == 4 && MATRIX != kPlain);
    const int lane = threadIdx.x % 32, warp = of_warp(threadIdx.x / 32);
    Ring ring;
    ring.full = shared_address(barriers), ring.empty = ring.full + 8 * kMostStages;
    const uint32_t skipped = (1024 - shared_address(memory) % 1024) % 1024;
    ring.data = shared_address(memory) + skipped;
    ring.stages = args.stages, ring.stage_bytes = Stage<Mxfp4E4m3, E4m3Rows, 4, MOST, BLOCKS>::kBytes;
    ring.slot = 0;
    if (threadIdx.x == 0) {
        init_barriers(args, ring, 4, WG * 4);
        for (int i = 0; i < WG; ++i) barrier_init(shared_address(&turns_of[i]), 4);
        barrier_init_visible();
    }
    uint8_t* behind = memory + skipped + ring.stages * ring.stage_bytes;
    float* largest = reinterpret_cast<float*>(behind + 8 * kMagnitudes);
    if (threadIdx.x < kMagnitudes) reinterpret_cast<uint64_t*>(behind)[threadIdx.x] = magnitudes(threadIdx.x);
    for (int i = threadIdx.x; i < 3 * MOST; i += blockDim.x) largest[i] = 0.0f;
    __syncthreads();
    if (MATRIX != kDown) {
        wait_for_previous_kernel();
        let_next_kernel_start();
    }
    const int groups = (args.rows + 63) / 64, tiles = (groups + 3) / 4, total = of_warp(*args.count) * tiles;

    if (warp >= WG * 4) {
        fewer_registers<few_registers(WG)>();
        ring.parity = 1;
        if (lane == 0) bring<Mxfp4E4m3, E4m3Rows, 4, MOST, BLOCKS, MATRIX>(args, ring, warp - WG * 4, total, tiles);
        return;
    }
    more_registers<registers(WG)>();
    ring.parity = 0;
    const int warpgroup = warp / 4;
    Turns turns{shared_address(&turns_of[warpgroup]), shared_address(&turns_of[(warpgroup + 1) % WG]), warpgroup == 0};
    float acc[MT][MOST / 2];
    int turn = 0;
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const int index = at / tiles, group = (at - index * tiles) * 4;
        int4 item = args.items[index];
        item.x = of_warp(item.x), item.y = of_warp(item.y), item.z = of_warp(item.z), item.w = of_warp(item.w);
        MultiplyE4m3<WG, MT, MOST, BLOCKS>(acc, args, ring, turns, item.z, shared_address(behind))
            .template run_all<WIDTHS...>(item.z);
        // Behind the places in the table.
        const uint8_t* scales = args.scales + item.x * args.scales_expert + groups * (args.columns / 64) * 128;
        if constexpr (MATRIX == kGated) {
            write_h<WG, MT, MOST>(args, acc, item, group, scales, largest, turn);
            if (++turn == 3) turn = 0;
        } else {
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const int tile16 = (group + warp / 4 * MT + m) * 4 + warp % 4;
                if (tile16 >= args.rows / 16) break;
                const long long bias = static_cast<long long>(item.x) * args.rows + tile16 * 16 + lane / 4;
                const uint8_t* low = scales + tile16 * 16 + lane / 4;
                const Finish finish{args, item, scale_of_row(low, args.scale, item.x),
                                    scale_of_row(low + 8, args.scale, item.x), load_bias(args.bias, args.bias_dtype, bias),
                                    load_bias(args.bias, args.bias_dtype, bias + 8)};
                write_tile<MATRIX, MOST>(finish, acc[m], tile16);
            }
        }
    }
}

}  // namespace polymoe

#define POLYMOE_W4A8(NAME, MATRIX, WG, ...)                                     \
    extern "C" __global__ void __launch_bounds__(WG * 128 + 128, 1)             \
        NAME(const __grid_constant__ polymoe::GemmArgs args) {                  \
        polymoe::w4a8_gemm<polymoe::MATRIX, WG, __VA_ARGS__>(args);             \
    }

// By the most rows of x of an item. The same numbers stand in launch.py.
#define POLYMOE_W4A8_SIZES(KIND, MATRIX)                          \
    POLYMOE_W4A8(w4a8_##KIND##_16, MATRIX, 4, 1, 4, 16, 8)        \
    POLYMOE_W4A8(w4a8_##KIND##_32, MATRIX, 4, 1, 4, 32, 8, 16, 24) \
    POLYMOE_W4A8(w4a8_##KIND##_64, MATRIX, 4, 1, 4, 64, 32, 48)   \
    POLYMOE_W4A8(w4a8_##KIND##_128, MATRIX, 2, 2, 2, 128, 32, 64, 96, 112)
