// E2M1 codes to bfloat16 by the instructions of ptx/convert_fp4.cuh: MXFP4 and NVFP4 of the layout w4a16_fragments_cvt.
// What a format's type has to offer is described in scales.cuh. Weights, times a power of two, are those of fp4.cuh.
#pragma once
#include "../ptx/convert_fp4.cuh"
#include "scales.cuh"

namespace polymoe {

// The E8M0 scales of rows g and g + 8, each of them in all bytes.
struct E8m0Pair {
    uint32_t low, high;
};

struct Mxfp4Cvt : Mxfp4Sizes {
    static constexpr float kAccScale = 1.0f;
    using Scale = E8m0Pair;
    struct Scales {
        E8m0Pair group[2];
    };

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        const uint2 bytes = make_uint2(words[0], 0);
        return {{{prmt(bytes, 0x0000), prmt(bytes, 0x1111)}, {prmt(bytes, 0x2222), prmt(bytes, 0x3333)}}};
    }

    static __device__ __forceinline__ Scale scale(const Scales& scales, int step) { return scales.group[step / 2]; }
};

// The scale is part of the conversion. 4 instructions.
template <>
__device__ __forceinline__ void dequantize<Mxfp4Cvt>(uint32_t (&a)[4], const uint32_t* words, E8m0Pair scale) {
    e2m1x8_to_bf16(a, *words, scale.low, scale.high);
}

struct Nvfp4Cvt : Nvfp4Sizes {
    static constexpr float kAccScale = 1.0f;
    using Scale = uint32_t;
    struct Scales {
        uint32_t group[4];
    };

    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {{e4m3x2_to_bf16x2_low(words[0]), e4m3x2_to_bf16x2_high(words[0]), e4m3x2_to_bf16x2_low(words[1]),
                 e4m3x2_to_bf16x2_high(words[1])}};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.group[step]; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], const uint32_t* words) { e2m1x8_to_bf16(a, *words); }
};

}  // namespace polymoe
