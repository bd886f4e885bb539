// E4M3 codes with E8M0 scales for groups of 32 columns (MXFP8) to bfloat16. What a format's type has to offer is
// described in scales.cuh; where the bits lie, in layouts/cuda/w8a16_fragments.py.
#pragma once
#include "../ptx/convert.cuh"
#include "block_columns.cuh"

namespace polymoe {

// Four E4M3 codes to bfloat16, times 2^-120. 5 instructions.
__device__ __forceinline__ void dequant_e4m3(uint32_t& first, uint32_t& second, uint32_t word) {
    first = word & 0x87F087F0u;
    second = ((word << 4) & 0x80F080F0u) | ((word >> 4) & 0x07000700u);
}

struct Mxfp8 {
    static constexpr int kScaleBytes = 64, kScaleBlocks = 1;
    static constexpr float kAccScale = 262144.0f;  // 2^18: scales are stored times 2^102
    using Scale = uint32_t;
    struct Scales {
        uint32_t pair;
    };

    // Of the first two bytes: rows g and g + 8.
    static __device__ __forceinline__ Scales scales(const uint32_t* words) {
        return {prmt(make_uint2(words[0], 0), 0x4140) << 7};
    }

    static __device__ __forceinline__ uint32_t scale(const Scales& scales, int step) { return scales.pair; }

    static __device__ __forceinline__ void codes(uint32_t (&a)[4], const uint32_t* words) {
        dequant_e4m3(a[0], a[1], words[0]);
        dequant_e4m3(a[2], a[3], words[1]);
    }
};

template <>
constexpr int kBlockColumns<Mxfp8> = 32;

}  // namespace polymoe
