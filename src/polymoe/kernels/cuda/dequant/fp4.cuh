// E2M1 codes to bfloat16: MXFP4 and NVFP4. What a format's type has to offer is described in scales.cuh.
#pragma once
#include "../ptx/convert.cuh"
#include "../ptx/compiler.cuh"
#include "../sizes.cuh"

namespace polymoe {

// Eight E2M1 codes to bfloat16, times 2^-126. 9 instructions.
__device__ __forceinline__ void dequant_e2m1(uint32_t (&a)[4], uint32_t word) {
    const uint32_t mask = 0x81C081C0u;
    a[0] = word & mask;
    a[1] = (word << 4) & mask;
    a[2] = __funnelshift_l(word, word, 10) & mask;
    a[3] = ((word << 6) & 0x80C080C0u) | ((word >> 2) & 0x01000100u);
}

struct Mxfp4 : Mxfp4Sizes {
    static constexpr float kAccScale = 16777216.0f;  // scales are stored times 2^102
    using Scale = uint32_t;
    struct Scales {
        uint32_t group[2];
    };

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {{words[0] & 0x7F807F80u, __funnelshift_l(words[0], words[0], 8) & 0x7F807F80u}};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.group[step / 2]; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], const uint32_t* words) { dequant_e2m1(a, *words); }
};

struct Nvfp4 : Nvfp4Sizes {
    static constexpr float kAccScale = 274877906944.0f;  // scales are stored times 2^88
    using Scale = uint32_t;
    struct Scales {
        uint32_t group[4];
    };

    // Exponent and mantissa stay in place and two more exponent bits are set. A zero scale is then 2^65. Subtracting
    // that leaves the others unchanged, since they are 2^79 at least.
    static __device__ __forceinline__ uint32_t pair(uint32_t word) {
        return add_bf16x2((word & opaque_constant<0x0FF00FF0u>()) | 0x60006000u, 0xE000E000u);
    }

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {{pair(words[0]), pair(__funnelshift_l(words[0], words[0], 8)), pair(words[1]),
                 pair(__funnelshift_l(words[1], words[1], 8))}};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.group[step]; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], const uint32_t* words) { dequant_e2m1(a, *words); }
};

}  // namespace polymoe
