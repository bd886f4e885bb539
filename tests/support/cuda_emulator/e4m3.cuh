// In place of the kernels' e4m3.cuh.
#pragma once
#include "ptx.cuh"

namespace polymoe {

inline uint32_t pack_e4m3(float a, float b) {
    return emulator::to_e4m3(a) | static_cast<uint32_t>(emulator::to_e4m3(b)) << 8;
}

inline uint32_t low_codes(uint32_t word) {
    const uint16_t low = to_float16(emulator::from_e4m3(word & 0xFF)), high = to_float16(emulator::from_e4m3(word >> 8 & 0xFF));
    return low | static_cast<uint32_t>(high) << 16;
}

inline uint32_t high_codes(uint32_t word) { return low_codes(word >> 16); }

}  // namespace polymoe
