// In place of the kernels' wgmma_float16.cuh.
#pragma once
#include "wgmma.cuh"

namespace polymoe {

inline uint32_t low_codes(uint32_t word) {
    const uint16_t low = to_float16(emulator::from_e4m3(word & 0xFF)), high = to_float16(emulator::from_e4m3(word >> 8 & 0xFF));
    return low | static_cast<uint32_t>(high) << 16;
}

inline uint32_t high_codes(uint32_t word) { return low_codes(word >> 16); }

template <int N>
struct Float16Product {
    static void add(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, false, false, true});
    }
    static void set(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, false, true, true});
    }
};

}  // namespace polymoe
