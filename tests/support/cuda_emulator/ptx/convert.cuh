// Stands in for the kernels' ptx/convert.cuh.
#pragma once
#include "../cuda.h"

namespace polymoe {

inline uint16_t f32_to_bf16(float v) { return emulator::to_bits(v); }
inline float bf16_to_f32(uint16_t v) { return emulator::bfloat16(v); }
inline uint16_t f32_to_f16(float v) {
    const _Float16 h = static_cast<_Float16>(v);
    uint16_t r;
    memcpy(&r, &h, 2);
    return r;
}
inline float f16_to_f32(uint16_t v) { return emulator::float16(v); }

inline uint32_t pack_bf16x2(float a, float b) {
    return emulator::to_bits(a) | static_cast<uint32_t>(emulator::to_bits(b)) << 16;
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t s, int which) {
    const float f = emulator::half(s, which);
    return pack_bf16x2(emulator::half(a, 0) * f, emulator::half(a, 1) * f);
}
inline uint32_t mul_bf16x2_low(uint32_t a, uint32_t s) { return mul_bf16x2(a, s, 0); }
inline uint32_t mul_bf16x2_high(uint32_t a, uint32_t s) { return mul_bf16x2(a, s, 1); }
inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    return pack_bf16x2(emulator::half(a, 0) + emulator::half(b, 0), emulator::half(a, 1) + emulator::half(b, 1));
}

inline uint32_t pack_e4m3x2(float a, float b) {
    return emulator::to_e4m3(a) | static_cast<uint32_t>(emulator::to_e4m3(b)) << 8;
}
inline uint32_t e4m3x2_to_f16x2_low(uint32_t word) {
    const uint16_t low = f32_to_f16(emulator::from_e4m3(word & 0xFF));
    const uint16_t high = f32_to_f16(emulator::from_e4m3(word >> 8 & 0xFF));
    return low | static_cast<uint32_t>(high) << 16;
}
inline uint32_t e4m3x2_to_f16x2_high(uint32_t word) { return e4m3x2_to_f16x2_low(word >> 16); }

template <int I>
uint32_t extract_byte(uint32_t word) {
    return word >> 8 * I & 0xFF;
}
inline uint32_t prmt(uint2 bytes, uint32_t selector) {
    const uint64_t all = bytes.x | static_cast<uint64_t>(bytes.y) << 32;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t byte = all >> (selector >> 4 * i & 7) * 8 & 0xFF;
        r |= (selector >> 4 * i & 8 ? (byte >> 7) * 0xFF : byte) << 8 * i;
    }
    return r;
}

inline float exp2_approx(float v) { return exp2f(v); }
inline float fast_divide(float a, float b) { return a / b; }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }

// In double, where a product and a sum of numbers with 8 bits are exact unless they are 2^30 apart.
inline uint32_t fma_bf16x2(uint32_t a, uint32_t s, uint32_t c, int which) {
    uint32_t r = 0;
    for (int i = 0; i < 2; ++i) {
        const double factor = emulator::half(s, which), more = emulator::half(c, which);
        const float v = static_cast<float>(emulator::half(a, i) * factor + more);
        r |= static_cast<uint32_t>(emulator::to_bits(v)) << 16 * i;
    }
    return r;
}
inline uint32_t fma_bf16x2_low(uint32_t a, uint32_t s, uint32_t c) { return fma_bf16x2(a, s, c, 0); }
inline uint32_t fma_bf16x2_high(uint32_t a, uint32_t s, uint32_t c) { return fma_bf16x2(a, s, c, 1); }
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    const uint32_t low = emulator::to_bits(emulator::half(a, 0) * emulator::half(b, 0));
    return low | static_cast<uint32_t>(emulator::to_bits(emulator::half(a, 1) * emulator::half(b, 1))) << 16;
}

}  // namespace polymoe
