// 4-bit integers to bfloat16, with scales for groups of 32 or 128 columns.
//
// The layout stores codes less 7.5, which have a sign and three bits of magnitude: subnormal bfloat16 numbers take them
// as they are. One multiplication and addition then makes the weight: (code - 7.5) * scale + offset. Without zero
// points 8 stands for zero, so that the offset is half of the scale, which is exact, and the weight is rounded once.
#pragma once
#include <type_traits>

#include "../ptx/convert.cuh"
#include "../ptx/compiler.cuh"
#include "../sizes.cuh"

namespace polymoe {

// Eight codes to bfloat16: integers plus 1/2, times 2^-129. 7 instructions.
__device__ __forceinline__ void dequant_int4(uint32_t (&a)[4], uint32_t word) {
    const uint32_t mask = opaque_constant<0x80708070u>();
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = (__funnelshift_r(word, word, 4 * i) & mask) | 0x00080008u;
}

// Of rows g and g + 8.
struct ScaleAndOffset {
    uint32_t scale, offset;
};

// A scale is a pair of bfloat16, and with zero points a pair of offsets follows: 7.5 less the zero point, times the
// scale.
template <int GROUP, bool ZERO_POINTS = false>
struct Int4 {
    using Sizes = std::conditional_t<GROUP == 32, Int4G32Sizes, Int4G128Sizes>;
    static constexpr int kScaleBytes = Sizes::kScaleBytes * (ZERO_POINTS ? 2 : 1), kScaleBlocks = Sizes::kScaleBlocks;
    static_assert(GROUP == 32 || GROUP == 128);
    static constexpr float kAccScale = 36893488147419103232.0f;  // 2^65: scales are multiplied by 2^64
    static constexpr int kGroups = GROUP == 32 ? 2 : 1, kWords = ZERO_POINTS ? 2 : 1;
    using Scale = ScaleAndOffset;
    struct Scales {
        uint32_t group[kGroups][kWords];
    };

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        Scales scales;
#pragma unroll
        for (int i = 0; i < kGroups * kWords; ++i) scales.group[i / kWords][i % kWords] = words[i];
        return scales;
    }

    static __device__ __forceinline__ Scale scale(const Scales& scales, int step) {
        const uint32_t(&words)[kWords] = scales.group[step * kGroups / 4];
        const uint32_t scale = mul_bf16x2(words[0], 0x5F805F80u);                     // 2^64
        if (ZERO_POINTS) return {scale, mul_bf16x2(words[kWords - 1], 0x1F001F00u)};  // 2^-65
        return {scale, mul_bf16x2(words[0], 0x9E809E80u)};                            // -2^-66
    }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], const uint32_t* words) { dequant_int4(a, *words); }
};

}  // namespace polymoe
