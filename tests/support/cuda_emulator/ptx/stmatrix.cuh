// Stands in for the kernels' ptx/stmatrix.cuh.
#pragma once
#include "memory.cuh"

namespace polymoe {

inline void stmatrix_x4(uint32_t smem, const uint32_t (&r)[4]) {
    struct Brought {
        uint32_t smem;
        const uint32_t* r;
    } mine{smem, r};
    emulator::meet_warp(&mine, [](void** with) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                const uint32_t row = static_cast<Brought*>(with[i * 8 + lane / 4])->smem;
                smem_pointer(row, 16);
                store_shared(row + lane % 4 * 4, static_cast<Brought*>(with[lane])->r[i]);
            }
        }
    });
}

}  // namespace polymoe
