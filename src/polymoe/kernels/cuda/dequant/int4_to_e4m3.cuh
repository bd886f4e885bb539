// 4-bit integers to E4M3, which holds every integer from -16 to 16.
//
// A code less its zero point becomes an E4M3 number. Its group's scale, which may be any number, multiplies sums of the
// group's 128 columns: layouts/cuda/w4a8_fragments.py stores it as float32, with the zero point in its last four bits.
#pragma once
#include "../ptx/convert.cuh"

namespace polymoe {

template <bool ZERO_POINTS>
struct Int4ToE4m3 {
    static constexpr int kScaleBytes = 256, kScaleBlocks = 2;  // of 64 rows and 128 columns
};

// Eight codes of a row, stored as sign and i: i, or -(i + 1). Bytes from 0 to 15 are integers times 2^-9, so that a one
// is added to i where there is a sign. 7 instructions.
__device__ __forceinline__ void dequant_int4_to_e4m3(uint32_t& first, uint32_t& second, uint32_t word) {
    const uint32_t other = __funnelshift_r(word, word, 4);
    first = (word & 0x87878787u) + ((word & 0x80808080u) >> 7);
    second = (other & 0x87878787u) + ((other & 0x80808080u) >> 7);
}

// Numbers 4 * `quarter` to 4 * `quarter` + 3, less the zero point.
__device__ __forceinline__ uint32_t int4_lut(int zero_point, int quarter) {
    const float least = static_cast<float>(4 * quarter - zero_point);
    return pack_e4m3x2(least, least + 1.0f) | pack_e4m3x2(least + 2.0f, least + 3.0f) << 16;
}

// Eight codes of a row, which index the 16 bytes of their zero point's table. The fourth bits of codes are signs of the
// word's bytes, or are after << 4. 11 instructions.
__device__ __forceinline__ void lookup_int4_in_e4m3(uint32_t& first, uint32_t& second, uint32_t word, uint4 lut) {
    const uint2 low = make_uint2(lut.x, lut.y), high = make_uint2(lut.z, lut.w);
    const uint32_t selector = word & 0x77777777u;
    const uint32_t first_high = prmt(make_uint2(word << 4, 0), 0xBA98), second_high = prmt(make_uint2(word, 0), 0xBA98);
    first = (prmt(low, selector) & ~first_high) | (prmt(high, selector) & first_high);
    second = (prmt(low, selector >> 16) & ~second_high) | (prmt(high, selector >> 16) & second_high);
}

}  // namespace polymoe
