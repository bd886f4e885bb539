// E2M1 codes to E4M3, through a table that already holds the group's scale.
//
// A weight is a code times its group's scale. How far that scale is below the largest of the row, a power of two, is
// part of the decoded weight; the row's largest multiplies the accumulator. A scale in the layout w4a8_fragments is
// therefore the offset of an entry of the table.
#pragma once
#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"
#include "../sizes.cuh"

namespace polymoe {

constexpr int kLutSteps = 16;

// An entry: the eight magnitudes of E2M1 times 2^-step, as bytes of E4M3 that are 2^6 times as large; zeros for
// step 15.
__device__ __forceinline__ uint64_t e2m1_lut(int step) {
    uint64_t bytes = 0;
    for (int i = 1; i < 8 && step < 15; ++i) {
        const int halves = i < 4 ? i : i == 7 ? 12 : 2 * i - 4;
        const int units = halves << (14 - step), top = 31 - __clz(units);  // of 2^-9, the least that E4M3 holds
        bytes |= static_cast<uint64_t>(top < 3 ? units : (top - 2) * 8 + (units >> (top - 3)) - 8) << 8 * i;
    }
    return bytes;
}

// Eight codes of a row: columns 4t to 4t + 3, and those 16 further on. 7 instructions.
__device__ __forceinline__ void dequant_e2m1_to_e4m3(uint32_t& first, uint32_t& second, uint32_t word, uint2 lut) {
    const uint32_t selector = word & 0x77777777u;
    first = prmt(lut, selector) | ((word << 4) & 0x80808080u);
    second = prmt(lut, selector >> 16) | (word & 0x80808080u);
}

// MXFP4: for each 64 columns, the offsets for two groups of 32, of rows g and g + 8.
struct Mxfp4ToE4m3 : Mxfp4Sizes {
    static constexpr int kSecondHalf = 8, kPair = 2;  // columns of h are in their own order

    // What a row's accumulators are multiplied by: 2^-6 from the table, the row's largest scale, the expert's scale.
    static __device__ __forceinline__ float row_scale(const uint8_t* row_max, const float* expert_scale, int expert) {
        const uint32_t exponent = *row_max;
        const float power = __uint_as_float(exponent ? exponent << 23 : 1u << 22);
        return power * (expert_scale ? 0.015625f * expert_scale[expert] : 0.015625f);
    }
};

}  // namespace polymoe
