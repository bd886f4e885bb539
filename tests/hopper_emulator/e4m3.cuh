// In place of the kernels' e4m3.cuh.
#pragma once

namespace polymoe {

inline uint32_t pack_e4m3(float a, float b) {
    return emulator::to_e4m3(a) | static_cast<uint32_t>(emulator::to_e4m3(b)) << 8;
}

}  // namespace polymoe
