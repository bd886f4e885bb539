// Prefill: enough rows an expert that each decoded weight is used many times. Products of the matrix units' own kind
// (wgmma), weights as the left operand in registers: while one group of products runs, the next weights are decoded.
//
// x comes in tiles, as `spread` in rows.cu and this kernel's own epilogue write them: for each item, for each 64
// columns, its rows of 128 bytes, swizzled. An item is one expert with up to MOST of the rows that chose it.
#include "gemm.cuh"
#include "mxfp4.cuh"
#include "wgmma.cuh"

namespace polymoe {

// Registers of a thread that multiplies. A warpgroup that brings data gives its own up; what the block was started with
// is all there is, and asking for more would wait for ever.
__host__ __device__ constexpr int registers(int warpgroups) {
    return warpgroups == 2 ? 240 : warpgroups == 3 ? 160 : 112;
}

constexpr int kMostStages = 16;

// Where column `column` of row `row` of an item stands, in elements from the item's first.
__device__ __forceinline__ int tile_place(int row, int column, int rows) {
    const int chunk = (column / 8 % 8) ^ (row % 8);
    return column / 64 * rows * 64 + row * 64 + chunk * 8 + column % 8;
}

// Two rows of products (g and g + 8 of a tile of 16) by 8 rows of x, brought to an end. c: rows 2t and 2t + 1 of x for
// g, then for g + 8; afterwards a lane has row g of x and the products' rows 2t and 2t + 1, and writes 4 bytes.
template <int MATRIX>
__device__ __forceinline__ void finish(
    const GemmArgs& args, const float* c, int4 item, int row16, int n0, float low_bias, float high_bias) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n = n0 + g;
    float low[2] = {c[0] * kUnscale, c[1] * kUnscale}, high[2] = {c[2] * kUnscale, c[3] * kUnscale};
    if (MATRIX != kDown && args.weights) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float weight = args.weights[args.order[item.y + min(n0 + 2 * t + i, item.z - 1)]];
            low[i] *= weight, high[i] *= weight;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) low[i] += low_bias, high[i] += high_bias;
    if (MATRIX == kDown) {
        const uint32_t first = transposed(pack_bfloat16(low[0], low[1]));
        const uint32_t second = transposed(pack_bfloat16(high[0], high[1]));
        if (n < item.z) {
            const long long row = static_cast<long long>(args.order[item.y + n]) * args.rows + row16 + 2 * t;
            uint16_t* out = static_cast<uint16_t*>(args.out) + row;
            *reinterpret_cast<uint32_t*>(out) = first;
            *reinterpret_cast<uint32_t*>(out + 8) = second;
        }
    } else {
        const int width = MATRIX == kGated ? args.rows / 2 : args.rows;
        uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(item.y) * ((width + 63) / 64 * 64);
        if (MATRIX == kGated) {
            const uint32_t v = transposed(pack_bfloat16(gated(args, low[0], high[0]), gated(args, low[1], high[1])));
            if (n < item.z) *reinterpret_cast<uint32_t*>(out + tile_place(n, row16 / 2 + 2 * t, item.z)) = v;
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) low[i] = fmaxf(low[i], 0.0f), high[i] = fmaxf(high[i], 0.0f);
            const uint32_t first = transposed(pack_bfloat16(low[0] * low[0], low[1] * low[1]));
            const uint32_t second = transposed(pack_bfloat16(high[0] * high[0], high[1] * high[1]));
            if (n < item.z) {
                *reinterpret_cast<uint32_t*>(out + tile_place(n, row16 + 2 * t, item.z)) = first;
                *reinterpret_cast<uint32_t*>(out + tile_place(n, row16 + 8 + 2 * t, item.z)) = second;
            }
        }
    }
}

struct Ring {
    uint32_t full, empty, data;
    int stages, stage_bytes;
    int slot;
    uint32_t parity;

    __device__ __forceinline__ void next() {
        if (++slot == stages) slot = 0, parity ^= 1;
    }
};

// All of K for MT groups of 64 rows of this warpgroup, and N of the item's rows.
//
// A unit is 32 columns. Its weights are decoded while the products of the unit before run: two sets of registers take
// turns, and a set is written again only when the products that read it have been waited for.
template <int WG, int MT, int N, int COUNT>
struct Multiply {
    static constexpr int kCodes = COUNT * 2 * 128, kScales = kCodes + WG * MT * 2048;  // in a stage, behind x
    float (&acc)[MT][COUNT];
    const GemmArgs& args;
    Ring& ring;
    int group, tiles16;
    uint32_t lane_codes, lane_scales;
    int whole, rest;
    uint32_t words[MT][2];
    Scales factors[MT];
    uint32_t a[2][MT][2][4];

    __device__ __forceinline__ Multiply(
        float (&acc)[MT][COUNT], const GemmArgs& args, Ring& ring, int group, int tiles16)
        : acc(acc), args(args), ring(ring), group(group), tiles16(tiles16) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, inner = threadIdx.x / 128 * MT;
        lane_codes = kept(kCodes + inner * 2048 + warp * 512 + lane * 16);
        lane_scales = kept(kScales + inner * 128 + lane / 4 * 16 + warp * 4);
        whole = args.columns / 64, rest = args.columns % 64 / 16;
    }

    // Codes of the unit, and scales of its block.
    template <int PART>
    __device__ __forceinline__ void load(int block, uint32_t data) {
        if (block < whole) {
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const uint2 w = load_shared_8(data + lane_codes + m * 2048 + PART * 8);
                words[m][0] = w.x, words[m][1] = w.y;
            }
        } else {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, inner = threadIdx.x / 128 * MT;
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const bool there = warp < tiles16 - 4 * (group + inner + m);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const int step = PART * 2 + s;
                    const uint32_t at = data + kCodes + (inner + m) * 2048 + (warp * rest + step) * 128 + lane * 4;
                    words[m][s] = there && step < rest ? load_shared_4(at) : 0;
                }
            }
        }
        if (PART == 0) {
#pragma unroll
            for (int m = 0; m < MT; ++m) factors[m] = decode_scales(load_shared_4(data + lane_scales + m * 128));
        }
    }

    template <int PART>
    __device__ __forceinline__ void convert() {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                decode(a[PART][m][s], words[m][s], factors[m].group[PART]);
#pragma unroll
                for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[PART][m][s][i])::"memory");  // here, not later
            }
        }
    }

    template <int PART>
    __device__ __forceinline__ void products(uint32_t data) {
        const uint64_t b = describe(data + PART * 64);
        products_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
            for (int m = 0; m < MT; ++m) Product<N>::add(acc[m], a[PART][m][s], b + s * 2);
        }
        products_commit();
    }

    __device__ __forceinline__ void run() {
        const bool leader = threadIdx.x % 32 == 0;
        const int blocks = whole + (rest > 0);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[m][i] = 0.0f;
        }
        uint32_t data = ring.data + ring.slot * ring.stage_bytes, given = ring.empty + 8 * ring.slot;
        barrier_wait(ring.full + 8 * ring.slot, ring.parity);
        load<0>(0, data);
        convert<0>();
        for (int block = 0; block < blocks; ++block) {
            load<1>(block, data);
            products<0>(data);
            products_wait<1>();  // the block before is done
            if (block && leader) barrier_arrive(given);
            given = ring.empty + 8 * ring.slot;
            convert<1>();
            products<1>(data);
            ring.next();
            if (block + 1 < blocks) {
                data = ring.data + ring.slot * ring.stage_bytes;
                barrier_wait(ring.full + 8 * ring.slot, ring.parity);
                load<0>(block + 1, data);
            }
            products_wait<1>();
            convert<0>();
        }
        products_wait<0>();
        if (leader) barrier_arrive(given);
    }
};

// MT groups of 64 rows for each of WG warpgroups by up to MOST rows of x, in products of VARIANTS widths.
template <int WG, int MT, int MOST, int VARIANTS, int MATRIX>
__device__ __forceinline__ void prefill_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * kMostStages];
    constexpr int kGroups = WG * MT;
    constexpr int kBringers = 4;  // warps of the last warpgroup; one alone cannot issue copies fast enough
    constexpr int kCodes = MOST * 128, kScales = kCodes + kGroups * 2048;  // in a stage, behind x
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Ring ring;
    ring.full = shared_address(barriers), ring.empty = ring.full + 8 * kMostStages;
    ring.data = (shared_address(memory) + 1023) / 1024 * 1024;
    ring.stages = args.stages, ring.stage_bytes = (kScales + kGroups * 128 + 1023) / 1024 * 1024;
    ring.slot = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; ++i) {
            barrier_init(ring.full + 8 * i, kBringers);
            barrier_init(ring.empty + 8 * i, WG * 4);
        }
        barrier_init_visible();
    }
    __syncthreads();
    if (MATRIX != kDown) {
        wait_for_previous_kernel();
        let_next_kernel_start();
    }
    const int tiles16 = args.rows / 16, groups = (tiles16 + 3) / 4, tiles = (groups + kGroups - 1) / kGroups;
    const int units = (args.columns + 63) / 64;
    const int total = *args.count * tiles;

    if (warp >= WG * 4) {
        fewer_registers<24>();
        if (lane == 0) {
            const int bringer = warp - WG * 4;
            constexpr int kMine = (kGroups + kBringers - 1) / kBringers;
            ring.parity = 1;
            bool waited = MATRIX != kDown;
            for (int at = blockIdx.x; at < total; at += gridDim.x) {
                const int index = at / tiles, group = (at - index * tiles) * kGroups;
                const int4 item = args.items[index];
                const uint8_t *codes[kMine], *scales[kMine];
                int width[kMine];
                uint32_t bytes = bringer == 0 ? item.z * 128 : 0, last_bytes = bytes;
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    const int inner = i * kBringers + bringer, g = group + inner;
                    width[i] = inner < kGroups ? max(0, min(4, tiles16 - 4 * g)) : 0;
                    codes[i] = args.codes + item.x * args.codes_expert + 32LL * g * args.columns;
                    scales[i] = args.scales + item.x * args.scales_expert + 128LL * g * units;
                    bytes += width[i] ? width[i] * 512 + 128 : 0;
                    last_bytes += width[i] ? width[i] * (args.columns % 64 * 8) + 128 : 0;
                }
                const uint16_t* x = args.x + static_cast<long long>(item.y) * units * 64;
                for (int block = 0; block < units; ++block) {
                    const uint32_t barrier = ring.full + 8 * ring.slot, to = ring.data + ring.slot * ring.stage_bytes;
                    const bool part = block * 64 + 64 > args.columns;
                    barrier_wait(ring.empty + 8 * ring.slot, ring.parity);
                    barrier_arrive_expect(barrier, part ? last_bytes : bytes);
#pragma unroll
                    for (int i = 0; i < kMine; ++i) {
                        if (width[i]) {
                            const int inner = i * kBringers + bringer;
                            const int code_bytes = width[i] * (part ? args.columns % 64 * 8 : 512);
                            copy_bulk(to + kCodes + inner * 2048, codes[i], code_bytes, barrier);
                            copy_bulk(to + kScales + inner * 128, scales[i], 128, barrier);
                            codes[i] += width[i] * 512, scales[i] += 128;
                        }
                    }
                    if (bringer == 0) {
                        if (!waited) {
                            wait_for_previous_kernel();
                            let_next_kernel_start();
                            waited = true;
                        }
                        copy_bulk(to, x, item.z * 128, barrier);
                        x += item.z * 64;
                    }
                    ring.next();
                }
            }
        }
    } else {
        more_registers<registers(WG)>();
        ring.parity = 0;
        float acc[MT][MOST / 2];
        for (int at = blockIdx.x; at < total; at += gridDim.x) {
            const int index = at / tiles, group = (at - index * tiles) * kGroups;
            const int4 item = args.items[index];
            // The narrowest product that holds the item's rows.
            constexpr int kStep = MOST / VARIANTS;
            if (item.z <= kStep) Multiply<WG, MT, kStep, MOST / 2>(acc, args, ring, group, tiles16).run();
            else if (VARIANTS <= 2 || item.z <= 2 * kStep)
                Multiply<WG, MT, VARIANTS >= 2 ? 2 * kStep : MOST, MOST / 2>(acc, args, ring, group, tiles16).run();
            else if (VARIANTS <= 3 || item.z <= 3 * kStep)
                Multiply<WG, MT, VARIANTS >= 3 ? 3 * kStep : MOST, MOST / 2>(acc, args, ring, group, tiles16).run();
            else Multiply<WG, MT, MOST, MOST / 2>(acc, args, ring, group, tiles16).run();
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
#pragma unroll
                for (int n = 0; n < MOST / 8; ++n) {
                    if (n * 8 >= item.z) break;
                    finish<MATRIX>(args, &acc[m][n * 4], item, tile16 * 16, n * 8, low_bias, high_bias);
                }
            }
        }
    }
}

}  // namespace polymoe

#define POLYMOE_PREFILL(NAME, WG, MT, MOST, VARIANTS, MATRIX)                     \
    extern "C" __global__ void __launch_bounds__(WG * 128 + 128, 1)               \
        NAME(const __grid_constant__ polymoe::GemmArgs args) {                    \
        polymoe::prefill_gemm<WG, MT, MOST, VARIANTS, polymoe::MATRIX>(args);     \
    }

// Spread over warpgroups as measured: few rows want many rows of weights for each, many want many warps.
#define POLYMOE_PREFILL_SIZES(KIND, MATRIX)                    \
    POLYMOE_PREFILL(prefill_##KIND##_32, 2, 4, 32, 2, MATRIX)  \
    POLYMOE_PREFILL(prefill_##KIND##_64, 4, 1, 64, 4, MATRIX)  \
    POLYMOE_PREFILL(prefill_##KIND##_128, 3, 1, 128, 4, MATRIX)

POLYMOE_PREFILL_SIZES(gated, kGated)
POLYMOE_PREFILL_SIZES(plain, kPlain)
POLYMOE_PREFILL_SIZES(down, kDown)
