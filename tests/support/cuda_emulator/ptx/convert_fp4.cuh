// Stands in for the kernels' ptx/convert_fp4.cuh: each instruction as PTX's text defines it (cvt, PTX 9.2).
#pragma once
#include "../cuda.h"

namespace emulator {

// E2M1: a sign, two bits of exponent (bias 1), one of mantissa; neither infinity nor NaN.
inline float from_e2m1(uint32_t code) {
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const float v = exponent ? ldexpf(2 + mantissa, exponent - 2) : ldexpf(mantissa, -1);
    return code & 8 ? -v : v;
}

// UE8M0: a power of two; 0xFF is NaN.
inline float from_ue8m0(uint32_t byte) { return byte == 0xFF ? NAN : ldexpf(1.0f, static_cast<int>(byte) - 127); }

// cvt.rn.scaled::n2::ue8m0.bf16x2.e2m1x2: the low four bits give the low half; each has a scale of its own.
inline uint32_t cvt_scaled(uint32_t codes, uint32_t scales) {
    uint32_t r = 0;
    for (int i = 0; i < 2; ++i) {
        const double product = static_cast<double>(from_e2m1(codes >> 4 * i & 15)) * from_ue8m0(scales >> 8 * i & 0xFF);
        r |= static_cast<uint32_t>(to_bits(static_cast<float>(product))) << 16 * i;
    }
    return r;
}

}  // namespace emulator

namespace polymoe {

inline void e2m1x8_to_bf16(uint32_t (&a)[4], uint32_t word, uint32_t even, uint32_t odd) {
    for (int i = 0; i < 4; ++i) a[i] = emulator::cvt_scaled(word >> 8 * i & 0xFF, (i % 2 ? odd : even) & 0xFFFF);
}
inline void e2m1x8_to_bf16(uint32_t (&a)[4], uint32_t word) { e2m1x8_to_bf16(a, word, 0x7F7F, 0x7F7F); }

inline uint32_t e4m3x2_to_bf16x2_low(uint32_t word) {
    const uint32_t low = emulator::to_bits(emulator::from_e4m3(word & 0xFF));
    return low | static_cast<uint32_t>(emulator::to_bits(emulator::from_e4m3(word >> 8 & 0xFF))) << 16;
}
inline uint32_t e4m3x2_to_bf16x2_high(uint32_t word) { return e4m3x2_to_bf16x2_low(word >> 16); }

}  // namespace polymoe
