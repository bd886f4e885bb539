// Stands in for the kernels' ptx/mma.cuh.
#pragma once
#include "../cuda.h"

namespace polymoe {

inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Brought {
        float* c;
        const uint32_t* a;
        uint32_t b[2];
    } mine{c, a, {b0, b1}};
    emulator::meet_warp(&mine, [](void** with) {
        float* d[32];
        const uint32_t* a[32];
        for (int i = 0; i < 32; ++i) d[i] = static_cast<Brought*>(with[i])->c, a[i] = static_cast<Brought*>(with[i])->a;
        emulator::product(
            d, 8, [&](int row, int k) { return emulator::of_registers(a, row, k); },
            [&](int k, int n) {
                return emulator::half(static_cast<Brought*>(with[n * 4 + k % 8 / 2])->b[k / 8], k % 2);
            });
    });
}

inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    struct Brought {
        float* c;
        const uint32_t *a, *b;
    } mine{c, a, b};
    emulator::meet_warp(&mine, [](void** with) {
        float* d[32];
        const uint32_t* a[32];
        for (int i = 0; i < 32; ++i) d[i] = static_cast<Brought*>(with[i])->c, a[i] = static_cast<Brought*>(with[i])->a;
        emulator::product(
            d, 8, [&](int row, int k) { return emulator::of_registers(a, row, k, false, true); },
            [&](int k, int n) {
                const uint32_t pair = static_cast<Brought*>(with[n * 4 + k % 8 / 2])->b[k / 8];
                return emulator::float16(static_cast<uint16_t>(pair >> 16 * (k % 2)));
            });
    });
}

}  // namespace polymoe
