// Stands in for the kernels' ptx/ldmatrix.cuh.
#pragma once
#include "memory.cuh"

namespace polymoe {

template <int COUNT>
inline void ldmatrix(uint32_t (&r)[COUNT], uint32_t smem) {
    struct Brought {
        uint32_t smem;
        uint32_t* r;
    } mine{smem, r};
    emulator::meet_warp(&mine, [](void** with) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < COUNT; ++i) {
                const uint32_t row = static_cast<Brought*>(with[i * 8 + lane / 4])->smem;
                smem_pointer(row, 16);
                static_cast<Brought*>(with[lane])->r[i] = load_shared<uint32_t>(row + lane % 4 * 4);
            }
        }
    });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) { ldmatrix<4>(r, smem); }
inline void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t smem) {
    uint32_t r[2];
    ldmatrix<2>(r, smem);
    r0 = r[0], r1 = r[1];
}

inline uint32_t movmatrix_trans(uint32_t v) {
    return of_lanes(static_cast<int>(v), [](int lane, auto of) {
        const int g = lane / 4, t = lane % 4;
        auto element = [&](int row) { return static_cast<uint32_t>(of(row * 4 + g / 2)) >> 16 * (g % 2) & 0xFFFF; };
        return static_cast<int>(element(2 * t) | element(2 * t + 1) << 16);
    });
}

}  // namespace polymoe
