// Prefill: enough rows an expert that each decoded weight is used many times. Products of the matrix units' own kind
// (wgmma), weights as the left operand in registers: while one group of products runs, the next weights are decoded.
//
// x comes in tiles, as `spread` in rows.cu and this kernel's own epilogue write them: for each item, for each 64
// columns, its rows of 128 bytes, swizzled, with room for a multiple of 8 rows. An item is one expert with up to MOST of
// the rows that chose it. y is in expert order.
#pragma once
#include "packed.cuh"
#include "wgmma.cuh"

namespace polymoe {

// All of K for MT groups of 64 rows of this warpgroup and the item's rows, in products of N of them.
//
// A unit is 32 columns. Its weights are decoded while the products of the unit before run: two sets of registers take
// turns, and a set is written again only when the products that read it have been waited for.
template <class F, int WG, int MT, int MOST, int BLOCKS>
struct Multiply {
    using Shape = Stage<F, Bfloat16Rows, WG * MT, MOST, BLOCKS>;
    float (&acc)[MT][MOST / 2];
    Ring& ring;
    uint32_t lane_codes, lane_scales;  // in a stage
    uint32_t x_step;                   // from 64 columns of x to the next, in units of 16 bytes
    int tile, columns;
    uint32_t words[MT][4];
    typename F::Scales factors[MT];
    uint32_t a[2][MT][2][4];

    __device__ __forceinline__ Multiply(float (&acc)[MT][MOST / 2], const GemmArgs& args, Ring& ring, int rows)
        : acc(acc), ring(ring), tile(threadIdx.x / 32 % 4), columns(args.columns) {
        const int lane = threadIdx.x % 32, group = threadIdx.x / 128 * MT;
        lane_codes = kept(Shape::kCodes + group * Shape::kGroupCodes + tile * 512 + lane * 16);
        lane_scales = kept(Shape::kScales + group * Shape::kGroupScales + (lane / 4 * 4 + tile) * F::kTileScales);
        x_step = padded_rows(rows) * 8;
    }

    __device__ __forceinline__ void load_factors(uint32_t stage, int inner) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            factors[m] = load_scales<F>(
                stage + lane_scales + m * Shape::kGroupScales + inner / F::kBlocks * kScaleBytes<F>);
        }
    }

    // Codes and scales of a whole block. Where a group has no such tile, these are other bytes.
    __device__ __forceinline__ void load(uint32_t stage, int inner) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const uint4 w = load_shared_16(stage + lane_codes + m * Shape::kGroupCodes + inner * 2048);
            words[m][0] = w.x, words[m][1] = w.y, words[m][2] = w.z, words[m][3] = w.w;
        }
        load_factors(stage, inner);
    }

    template <int PART>
    __device__ __forceinline__ void convert() {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                decode<F>(a[PART][m][s], words[m][PART * 2 + s], F::scale(factors[m], PART * 2 + s));
#pragma unroll
                for (int i = 0; i < 4; ++i) made_here(a[PART][m][s][i]);
            }
        }
    }

    template <int N, int PART>
    __device__ __forceinline__ void products(uint32_t x) {
        products_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const uint64_t b = describe_units(x + PART * 4 + s * 2);
#pragma unroll
            for (int m = 0; m < MT; ++m) Product<N>::add(acc[m], a[PART][m][s], b);
        }
        products_commit();
    }

    // The last stage where it is not a whole one, 16 columns after the other and all rows that an item may have.
    __device__ __forceinline__ void rest(uint32_t stage, int steps) {
        for (int at = 0; at < steps; ++at) {
            const int inner = at / 4, of_block = min(4, steps - inner * 4), step = at % 4;
            // A whole block has a lane's words together, the last of fewer columns apart.
            const uint32_t word = inner * 2048 + (of_block == 4 ? step * 4 : (tile * of_block + step) * 128 -
                                                                                 tile * 512 - threadIdx.x % 32 * 12);
#pragma unroll
            for (int m = 0; m < MT; ++m) words[m][0] = load_shared_4(stage + lane_codes + m * Shape::kGroupCodes + word);
            load_factors(stage, inner);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const uint32_t low = step == 0 ? F::scale(factors[m], 0) : F::scale(factors[m], 1);
                const uint32_t high = step == 2 ? F::scale(factors[m], 2) : F::scale(factors[m], 3);
                decode<F>(a[0][m][0], words[m][0], step < 2 ? low : high);
            }
            products_fence();
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                Product<MOST>::add(acc[m], a[0][m][0], describe_units(in_units(stage) + inner * x_step + step * 2));
            }
            products_commit();
            products_wait<0>();
        }
    }

    // All whole stages.
    template <int N>
    __device__ __forceinline__ void run(int stages) {
        const bool leader = threadIdx.x % 32 == 0;
        uint32_t given = 0, stage = ring.wait(), x = in_units(stage);
        load(stage, 0);
        convert<0>();
        // Written out, every block takes registers of its own.
        constexpr int kUnroll = MT == 1 ? BLOCKS : 1;
        for (int left = stages; left > 0; --left) {
#pragma unroll kUnroll
            for (int inner = 0; inner < BLOCKS; ++inner) {
                products<N, 0>(x);
                products_wait<1>();  // the block before is done
                if (inner == 0 && given && leader) barrier_arrive(given);
                convert<1>();
                products<N, 1>(x);
                if (inner + 1 < BLOCKS) {
                    x += x_step;
                    load(stage, inner + 1);
                } else {
                    given = ring.empty + 8 * ring.slot;
                    ring.next();
                    if (left > 1) {
                        stage = ring.wait();
                        x = in_units(stage);
                        load(stage, 0);
                    }
                }
                products_wait<1>();
                convert<0>();
            }
        }
        products_wait<0>();
        if (leader) barrier_arrive(given);
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
        const int stages = columns / (64 * BLOCKS), steps = (columns - stages * (64 * BLOCKS)) / 16;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int i = 0; i < MOST / 2; ++i) acc[m][i] = 0.0f;
        }
        if (stages) run_narrowest<WIDTHS..., MOST>(stages, rows);
        if (steps) {
            rest(ring.wait(), steps);
            if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * ring.slot);
            ring.next();
        }
    }
};

// MT groups of 64 rows for each of WG warpgroups by up to MOST rows of x, in products of MOST or, if that is enough, one
// of the smaller WIDTHS. Each width takes registers of its own.
template <class F, int MATRIX, int WG, int MT, int BLOCKS, int MOST, int... WIDTHS>
__device__ __forceinline__ void prefill_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMostStages];
    constexpr int kGroups = WG * MT;
    const int lane = threadIdx.x % 32, warp = of_warp(threadIdx.x / 32);
    Ring ring = ring_at(args, memory, barriers, Stage<F, Bfloat16Rows, kGroups, MOST, BLOCKS>::kBytes);
    if (threadIdx.x == 0) {
        init_barriers(args, ring, 4, WG * 4);
        barrier_init_visible();
    }
    __syncthreads();
    if (MATRIX != kDown) {
        wait_for_previous_kernel();
        let_next_kernel_start();
    }
    const int tiles16 = args.rows / 16, groups = (tiles16 + 3) / 4, tiles = (groups + kGroups - 1) / kGroups;
    const int total = of_warp(*args.count) * tiles;

    if (warp >= WG * 4) {
        fewer_registers<few_registers(WG)>();
        ring.parity = 1;
        if (lane == 0) bring<F, Bfloat16Rows, kGroups, MOST, BLOCKS, MATRIX>(args, ring, warp - WG * 4, total, tiles);
    } else {
        more_registers<registers(WG)>();
        ring.parity = 0;
        float acc[MT][MOST / 2];
        for (int at = blockIdx.x; at < total; at += gridDim.x) {
            const int index = at / tiles, group = (at - index * tiles) * kGroups;
            int4 item = args.items[index];
            item.x = of_warp(item.x), item.y = of_warp(item.y), item.z = of_warp(item.z), item.w = of_warp(item.w);
            // The narrowest product that holds the item's rows.
            Multiply<F, WG, MT, MOST, BLOCKS>(acc, args, ring, item.z).template run_all<WIDTHS...>(item.z);
            const float low_scale = unscale<F>(args.scale, item.x);
            const float high_scale = MATRIX == kGated ? unscale<F>(args.up_scale, item.x) : low_scale;
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const int tile16 = (group + warp / 4 * MT + m) * 4 + warp % 4;
                if (tile16 >= tiles16) break;
                const int g = lane / 4, r = MATRIX == kGated ? tile16 * 8 + g : tile16 * 16 + g;
                const int width = MATRIX == kGated ? args.rows / 2 : args.rows;
                const long long bias = static_cast<long long>(item.x) * width + r;
                const float low_bias = load_bias(args.bias, args.bias_dtype, bias);
                const float high_bias = MATRIX == kGated ? load_bias(args.up_bias, args.bias_dtype, bias)
                                                         : load_bias(args.bias, args.bias_dtype, bias + 8);
                write_tile<MATRIX, MOST>(Finish{args, item, low_scale, high_scale, low_bias, high_bias}, acc[m], tile16);
            }
        }
    }
}

}  // namespace polymoe

#define POLYMOE_PREFILL(NAME, FORMAT, MATRIX, WG, ...)                                   \
    extern "C" __global__ void __launch_bounds__(WG * 128 + 128, 1)                      \
        NAME(const __grid_constant__ polymoe::GemmArgs args) {                           \
        polymoe::prefill_gemm<polymoe::FORMAT, polymoe::MATRIX, WG, __VA_ARGS__>(args);  \
    }

// Spread over warpgroups as measured: few rows want many rows of weights for each, many want many warps.
#define POLYMOE_PREFILL_SIZES(KIND, FORMAT, MATRIX)                                        \
    POLYMOE_PREFILL(prefill_##KIND##_32, FORMAT, MATRIX, 4, 2, 2, 32, 16)                  \
    POLYMOE_PREFILL(prefill_##KIND##_64, FORMAT, MATRIX, 4, 1, 2, 64, 32, 48)              \
    POLYMOE_PREFILL(prefill_##KIND##_128, FORMAT, MATRIX, 2, 2, 2, 128, 48, 96)            \
    POLYMOE_PREFILL(prefill_##KIND##_256, FORMAT, MATRIX, 2, 1, 1, 256, 96, 160, 192, 224)

#define POLYMOE_PREFILL_ALL(FORMAT)              \
    POLYMOE_PREFILL_SIZES(gated, FORMAT, kGated) \
    POLYMOE_PREFILL_SIZES(plain, FORMAT, kPlain) \
    POLYMOE_PREFILL_SIZES(down, FORMAT, kDown)
