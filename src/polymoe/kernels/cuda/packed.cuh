// Packed weights that are decoded in registers, on their way: the ring's stages, who fills them, and what becomes of the
// products' sums. Products are in prefill.cuh (rows of bfloat16) and w4a8.cuh (rows of e4m3).
#pragma once
#include "formats.cuh"
#include "gemm.cuh"
#include "tiles.cuh"

namespace polymoe {

// Registers of a thread that multiplies, and of one that brings data. What the block was started with is all there is,
// and asking for more would wait for ever.
__host__ __device__ constexpr int registers(int warpgroups) {
    return warpgroups == 2 ? 232 : warpgroups == 3 ? 152 : 112;
}

__host__ __device__ constexpr int few_registers(int warpgroups) { return warpgroups == 4 ? 32 : warpgroups == 3 ? 56 : 40; }

// What a warp has of a tile of 16 rows of weights: sums, and what becomes of them.
struct Finish {
    const GemmArgs& args;
    int4 item;
    float low_scale, high_scale, low_bias, high_bias;

    // Of the products' rows g and g + 8 for rows 2t and 2t + 1 of x.
    template <int MATRIX>
    __device__ __forceinline__ void scale(const float* c, int n0, float (&low)[2], float (&high)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float weight = 1.0f;
            if (MATRIX != kDown && args.weights) {
                const int row = min(n0 + static_cast<int>(threadIdx.x) % 4 * 2 + i, item.z - 1);
                weight = args.weights[args.order[item.y + row]];
            }
            low[i] = c[i] * (low_scale * weight) + low_bias, high[i] = c[2 + i] * (high_scale * weight) + high_bias;
        }
    }
};

// Writes a tile of 16 rows of weights by the item's rows of x; afterwards a lane has row g of x and the products' rows 2t
// and 2t + 1, and writes 4 bytes. h comes in tiles, y in expert order.
template <int MATRIX, int MOST>
__device__ __forceinline__ void write_tile(const Finish& finish, const float* acc, int tile16) {
    const GemmArgs& args = finish.args;
    const int4 item = finish.item;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int column = (MATRIX == kGated ? tile16 * 8 : tile16 * 16) + 2 * t;
    float low[2], high[2];
    if (MATRIX == kDown) {
        uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(item.y + g) * args.rows + column;
        const long long step = 8LL * args.rows;
#pragma unroll
        for (int n0 = 0; n0 < MOST; n0 += 8) {
            if (n0 >= item.z) break;
            finish.scale<MATRIX>(acc + n0 / 2, n0, low, high);
            const uint32_t first = transposed(pack_bfloat16(low[0], low[1]));
            const uint32_t second = transposed(pack_bfloat16(high[0], high[1]));
            if (n0 + g < item.z) {
                *reinterpret_cast<uint32_t*>(out) = first;
                *reinterpret_cast<uint32_t*>(out + 8) = second;
            }
            out += step;
        }
        return;
    }
    const int width = MATRIX == kGated ? args.rows / 2 : args.rows;
    uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(item.w) * ((width + 63) / 64 * 64);
    uint16_t* first_out = out + tile_place(g, column, item.z);  // 8 rows further on: 512 elements
    if (MATRIX == kPlain) {
        uint16_t* second_out = out + tile_place(g, column + 8, item.z);
#pragma unroll
        for (int n0 = 0; n0 < MOST; n0 += 8) {
            if (n0 >= item.z) break;
            finish.scale<MATRIX>(acc + n0 / 2, n0, low, high);
#pragma unroll
            for (int i = 0; i < 2; ++i) low[i] = greater(low[i], 0.0f), high[i] = greater(high[i], 0.0f);
            const uint32_t first = transposed(pack_bfloat16(low[0] * low[0], low[1] * low[1]));
            const uint32_t second = transposed(pack_bfloat16(high[0] * high[0], high[1] * high[1]));
            if (n0 + g < item.z) {
                *reinterpret_cast<uint32_t*>(first_out + n0 * 64) = first;
                *reinterpret_cast<uint32_t*>(second_out + n0 * 64) = second;
            }
        }
    } else if (args.activation == 0) {
#pragma unroll
        for (int n0 = 0; n0 < MOST; n0 += 8) {
            if (n0 >= item.z) break;
            finish.scale<MATRIX>(acc + n0 / 2, n0, low, high);
            const uint32_t v = transposed(pack_bfloat16(swiglu(args, low[0], high[0]), swiglu(args, low[1], high[1])));
            if (n0 + g < item.z) *reinterpret_cast<uint32_t*>(first_out + n0 * 64) = v;
        }
    } else {
#pragma unroll
        for (int n0 = 0; n0 < MOST; n0 += 8) {
            if (n0 >= item.z) break;
            finish.scale<MATRIX>(acc + n0 / 2, n0, low, high);
            const uint32_t v = transposed(pack_bfloat16(gated(args, low[0], high[0]), gated(args, low[1], high[1])));
            if (n0 + g < item.z) *reinterpret_cast<uint32_t*>(first_out + n0 * 64) = v;
        }
    }
}

// Rows of x in tiles of 128 bytes a row: columns of a tile, and bytes of a row's scale.
struct Bfloat16Rows {
    static constexpr int kColumns = 64, kScale = 0;
};

// Behind an item's tiles, for each of them the rows' scales in float32.
struct E4m3Rows {
    static constexpr int kColumns = 128, kScale = 4;
};

// BLOCKS times 64 columns make a stage: x, then the groups' codes, then their scales.
template <class F, class X, int GROUPS, int MOST, int BLOCKS>
struct Stage {
    static_assert(BLOCKS * 64 % X::kColumns == 0);
    static constexpr int kScaleUnits = (BLOCKS + F::kBlocks - 1) / F::kBlocks;
    static constexpr int kGroupCodes = BLOCKS * 2048, kGroupScales = kScaleUnits * kScaleBytes<F>;
    static constexpr int kTiles = BLOCKS * 64 / X::kColumns, kXScales = kTiles * MOST * 128;
    static constexpr int kCodes = kXScales + kTiles * MOST * X::kScale, kScales = kCodes + GROUPS * kGroupCodes;
    static constexpr int kBytes = (kScales + GROUPS * kGroupScales + 1023) / 1024 * 1024;
};

// Moves weights and x to shared memory: one thread of each of four warps, since one cannot issue copies fast enough.
template <class F, class X, int GROUPS, int MOST, int BLOCKS, int MATRIX>
__device__ __forceinline__ void bring(const GemmArgs& args, Ring& ring, int bringer, int total, int tiles) {
    using Shape = Stage<F, X, GROUPS, MOST, BLOCKS>;
    constexpr int kBringers = 4, kMine = (GROUPS + kBringers - 1) / kBringers;
    const bool brings_x = bringer == (GROUPS % kBringers == 0 ? 0 : kBringers - 1);  // who has least to do
    const int tiles16 = args.rows / 16, units = (args.columns + 63) / 64, strip = scale_units<F>(args.columns);
    bool waited = MATRIX != kDown;
    for (int at = blockIdx.x; at < total; at += gridDim.x) {
        const int index = at / tiles, group = (at - index * tiles) * GROUPS;
        const int4 item = args.items[index];
        const int padded = padded_rows(item.z), x_tiles = (args.columns + X::kColumns - 1) / X::kColumns;
        const uint8_t *codes[kMine], *scales[kMine];
        int width[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int inner = i * kBringers + bringer, g = group + inner;
            width[i] = inner < GROUPS ? max(0, min(4, tiles16 - 4 * g)) : 0;
            codes[i] = args.codes + item.x * args.codes_expert + 32LL * g * args.columns;
            scales[i] = args.scales + item.x * args.scales_expert + static_cast<long long>(g) * strip * kScaleBytes<F>;
        }
        const uint8_t* x = reinterpret_cast<const uint8_t*>(args.x) +
                           static_cast<long long>(item.w) * x_tiles * (128 + X::kScale);
        const uint8_t* x_scales = x + x_tiles * padded * 128;
        for (int block = 0; block < units; block += BLOCKS) {
            const uint32_t barrier = ring.full + 8 * ring.slot, to = ring.data + ring.slot * ring.stage_bytes;
            const int here = min(BLOCKS, units - block), columns = min(here * 64, args.columns - block * 64);
            const int scale_bytes = (here + F::kBlocks - 1) / F::kBlocks * kScaleBytes<F>;
            const int here_x = (columns + X::kColumns - 1) / X::kColumns * padded;  // rows of tiles
            uint32_t bytes = brings_x ? here_x * (128 + X::kScale) : 0;
#pragma unroll
            for (int i = 0; i < kMine; ++i) bytes += width[i] ? width[i] * columns * 8 + scale_bytes : 0;
            barrier_wait(ring.empty + 8 * ring.slot, ring.parity);
            barrier_arrive_expect(barrier, bytes);
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                if (width[i]) {
                    const int inner = i * kBringers + bringer;
                    const uint32_t to_codes = to + Shape::kCodes + inner * Shape::kGroupCodes;
                    // Scales for two blocks, where a stage is one: the same again for the second.
                    const int first_scale = block / F::kBlocks * kScaleBytes<F>;
                    if (width[i] == 4) {
                        copy_bulk(to_codes, codes[i], columns * 32, barrier);
                    } else {  // blocks stand as far apart as if they had all their rows
                        for (int b = 0; b < here; ++b) {
                            copy_bulk(to_codes + b * 2048, codes[i] + b * width[i] * 512,
                                      min(64, columns - b * 64) * 8 * width[i], barrier);
                        }
                    }
                    copy_bulk(to + Shape::kScales + inner * Shape::kGroupScales, scales[i] + first_scale, scale_bytes,
                              barrier);
                    codes[i] += width[i] * (BLOCKS * 512);
                }
            }
            if (brings_x) {
                if (!waited) {
                    wait_for_previous_kernel();
                    let_next_kernel_start();
                    waited = true;
                }
                copy_bulk(to, x, here_x * 128, barrier);
                x += here_x * 128;
                if constexpr (X::kScale != 0) {
                    copy_bulk(to + Shape::kXScales, x_scales, here_x * X::kScale, barrier);
                    x_scales += here_x * X::kScale;
                }
            }
            ring.next();
        }
    }
    // Whoever waits for this kernel relies on the one before having finished too.
    if (!waited) wait_for_previous_kernel();
}

}  // namespace polymoe
