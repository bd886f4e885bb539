// Conversions of E2M1 codes, and of their scales, to bfloat16, by instructions that SM100 and SM120 have.
//
// Elsewhere the same bits by arithmetic, so that a test can run these kernels on a GPU that has no such instructions.
#pragma once
#include <cstdint>

#include "convert.cuh"

namespace polymoe {

#if __CUDA_ARCH__ >= 1000

// The two E2M1 codes of each byte of a word; the code in the low half of a byte is the first. The low half of `even`
// has two E8M0 scales, for the two codes of byte 0 and for those of byte 2, that of `odd` for bytes 1 and 3.
__device__ __forceinline__ void e2m1x8_to_bf16(uint32_t (&a)[4], uint32_t word, uint32_t even, uint32_t odd) {
    asm("{\n.reg .b8 a, b, c, d;\n.reg .b16 even, odd, rest;\nmov.b32 {a, b, c, d}, %4;\n"
        "mov.b32 {even, rest}, %5;\nmov.b32 {odd, rest}, %6;\n"
        "cvt.rn.scaled::n2::ue8m0.bf16x2.e2m1x2 %0, a, even;\n"
        "cvt.rn.scaled::n2::ue8m0.bf16x2.e2m1x2 %1, b, odd;\n"
        "cvt.rn.scaled::n2::ue8m0.bf16x2.e2m1x2 %2, c, even;\n"
        "cvt.rn.scaled::n2::ue8m0.bf16x2.e2m1x2 %3, d, odd;\n}"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(word), "r"(even), "r"(odd));
}

// The same, not scaled.
__device__ __forceinline__ void e2m1x8_to_bf16(uint32_t (&a)[4], uint32_t word) {
    asm("{\n.reg .b8 a, b, c, d;\nmov.b32 {a, b, c, d}, %4;\n"
        "cvt.rn.bf16x2.e2m1x2 %0, a;\ncvt.rn.bf16x2.e2m1x2 %1, b;\n"
        "cvt.rn.bf16x2.e2m1x2 %2, c;\ncvt.rn.bf16x2.e2m1x2 %3, d;\n}"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(word));
}

// The two E4M3 numbers in the low, or the high, half of a word.
__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2_low(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.bf16x2.e4m3x2 %0, l;\n}" : "=r"(r) : "r"(word));
    return r;
}

__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2_high(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.bf16x2.e4m3x2 %0, h;\n}" : "=r"(r) : "r"(word));
    return r;
}

#else

// Codes to bfloat16, times 2^-126.
__device__ __forceinline__ void e2m1x8_bits(uint32_t (&a)[4], uint32_t word) {
    const uint32_t low = word & 0x0F0F0F0Fu, high = word >> 4 & 0x0F0F0F0Fu;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t pair = prmt(make_uint2(low, high), 0x8480 + i * 0x0101);  // a code in each half
        a[i] = pair * 0x1040u & 0x81C081C0u;
    }
}

__device__ __forceinline__ void e2m1x8_to_bf16(uint32_t (&a)[4], uint32_t word) {
    e2m1x8_bits(a, word);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = mul_bf16x2(a[i], 0x7E807E80u);  // 2^126
}

// For scales of at most 2: 2^126 times the scale is a bfloat16 then.
__device__ __forceinline__ void e2m1x8_to_bf16(uint32_t (&a)[4], uint32_t word, uint32_t even, uint32_t odd) {
    const uint32_t powers[2] = {prmt(make_uint2(even, 0), 0x4140) * 0x80u + 0x3F003F00u,
                                prmt(make_uint2(odd, 0), 0x4140) * 0x80u + 0x3F003F00u};
    e2m1x8_bits(a, word);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = mul_bf16x2(a[i], powers[i % 2]);
}

__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2_low(uint32_t word) {
    const uint32_t pair = e4m3x2_to_f16x2_low(word);
    return pack_bf16x2(f16_to_f32(static_cast<uint16_t>(pair)), f16_to_f32(static_cast<uint16_t>(pair >> 16)));
}

__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2_high(uint32_t word) { return e4m3x2_to_bf16x2_low(word >> 16); }

#endif

}  // namespace polymoe
