// Words of the Hopper layout to A operands in bfloat16. See layouts/hopper_order.py for where the bits lie.
//
// A format says how many bytes of scales stand beside 64 columns of a tile for each of its 8 pairs of rows
// (kTileScales; for kBlocks times 64 columns), what the accumulator is multiplied by at the end (kUnscale), how scales
// become pairs of bfloat16 (of rows g and g + 8; `scale` is the one for 16 columns), and how a word becomes the four
// registers of m16n8k16's A operand, still without scales.
#pragma once
#include "ptx.cuh"

namespace polymoe {

// Eight e2m1 codes to bfloat16: 2^-126 of their values. 9 instructions.
__device__ __forceinline__ void decode_e2m1(uint32_t (&a)[4], uint32_t word) {
    const uint32_t mask = 0x81C081C0u;
    a[0] = word & mask;
    a[1] = (word << 4) & mask;
    a[2] = __funnelshift_l(word, word, 10) & mask;
    a[3] = ((word << 6) & 0x80C080C0u) | ((word >> 2) & 0x01000100u);
}

// Eight int4 codes to bfloat16: their values and 136, since the mantissa of 128 takes four bits and 8 is zero. 7.
__device__ __forceinline__ void decode_int4_and_136(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ((word >> (4 * i)) & 0x000F000Fu) | 0x43004300u;
}

constexpr uint32_t kMinus136 = 0xC308C308u;

// Their values. 11.
__device__ __forceinline__ void decode_int4(uint32_t (&a)[4], uint32_t word) {
    decode_int4_and_136(a, word);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = add_pairs(a[i], kMinus136);
}

// 4 instructions.
__device__ __forceinline__ void apply_scale(uint32_t (&a)[4], uint32_t scale) {
    a[0] = times_low(a[0], scale), a[1] = times_high(a[1], scale);
    a[2] = times_low(a[2], scale), a[3] = times_high(a[3], scale);
}

struct Mxfp4 {
    static constexpr int kTileScales = 4, kBlocks = 1;
    static constexpr float kUnscale = 16777216.0f;  // scales are held times 2^102
    struct Scales {
        uint32_t group[2];
    };

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {{words[0] & 0x7F807F80u, __funnelshift_l(words[0], words[0], 8) & 0x7F807F80u}};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.group[step / 2]; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], uint32_t word) { decode_e2m1(a, word); }
};

struct Nvfp4 {
    static constexpr int kTileScales = 8, kBlocks = 1;
    static constexpr float kUnscale = 274877906944.0f;  // scales are held times 2^88
    struct Scales {
        uint32_t group[4];
    };

    // Exponent and mantissa in place, two more bits of exponent; a zero is then 2^65, which leaves the others as they
    // are when it is taken away: they are 2^79 at least.
    static __device__ __forceinline__ uint32_t pair(uint32_t word) {
        return add_pairs((word & 0x0FF00FF0u) | 0x60006000u, 0xE000E000u);
    }

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {{pair(words[0]), pair(__funnelshift_l(words[0], words[0], 8)), pair(words[1]),
                 pair(__funnelshift_l(words[1], words[1], 8))}};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.group[step]; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], uint32_t word) { decode_e2m1(a, word); }
};

// Scales for GROUP columns: 32 or 128.
template <int GROUP>
struct Int4 {
    static constexpr int kTileScales = GROUP == 32 ? 8 : 4, kBlocks = GROUP == 32 ? 1 : 2;
    static constexpr float kUnscale = 1.0f;
    struct Scales {
        uint32_t group[2];
    };

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {{words[0], words[GROUP == 32 ? 1 : 0]}};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.group[step / 2]; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], uint32_t word) { decode_int4(a, word); }
};

template <class F>
__device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word, uint32_t scale) {
    F::codes(a, word);
    apply_scale(a, scale);
}

// Bytes of scales beside 64 rows and F::kBlocks times 64 columns.
template <class F>
constexpr int kScaleBytes = 32 * F::kTileScales;

// Times that scales stand beside `columns` columns.
template <class F>
__device__ __forceinline__ int scale_units(int columns) {
    return (columns + 64 * F::kBlocks - 1) / (64 * F::kBlocks);
}

// The scales of one tile.
template <class F>
__device__ __forceinline__ typename F::Scales load_scales(uint32_t shared) {
    uint32_t words[2];
    if (F::kTileScales == 4) {
        words[0] = words[1] = load_shared_4(shared);
    } else {
        const uint2 v = load_shared_8(shared);
        words[0] = v.x, words[1] = v.y;
    }
    return F::scales(words);
}

// The words of two tiles' scales, to be decoded later.
template <class F>
__device__ __forceinline__ void load_scale_words(uint32_t (&words)[2][2], uint32_t shared) {
    if (F::kTileScales == 4) {
        const uint2 v = load_shared_8(shared);
        words[0][0] = v.x, words[1][0] = v.y;
    } else {
        const uint4 v = load_shared_16(shared);
        words[0][0] = v.x, words[0][1] = v.y, words[1][0] = v.z, words[1][1] = v.w;
    }
}

}  // namespace polymoe
