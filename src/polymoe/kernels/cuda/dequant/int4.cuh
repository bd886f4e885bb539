// Unsigned 4-bit codes with a zero point of 8 to bfloat16, scales for groups of 32 or 128 columns.
#pragma once
#include <type_traits>

#include "../ptx/convert.cuh"
#include "../sizes.cuh"

namespace polymoe {

// Eight codes to bfloat16, plus 136: the mantissa of 128 takes the four bits, and 8 stands for zero. 7 instructions.
__device__ __forceinline__ void dequant_int4_plus_136(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ((word >> (4 * i)) & 0x000F000Fu) | 0x43004300u;
}

constexpr uint32_t kMinus136 = 0xC308C308u;

// Without the 136. 11 instructions.
__device__ __forceinline__ void dequant_int4(uint32_t (&a)[4], uint32_t word) {
    dequant_int4_plus_136(a, word);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = add_bf16x2(a[i], kMinus136);
}

template <int GROUP>
struct Int4 : std::conditional_t<GROUP == 32, Int4G32Sizes, Int4G128Sizes> {
    static_assert(GROUP == 32 || GROUP == 128);
    static constexpr float kAccScale = 1.0f;
    struct Scales {
        uint32_t group[2];
    };

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {{words[0], words[GROUP == 32 ? 1 : 0]}};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.group[step / 2]; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], uint32_t word) { dequant_int4(a, word); }
};

}  // namespace polymoe
