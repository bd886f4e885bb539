// In place of the kernels' wgmma.cuh: products happen when their group is waited for, as late as they may.
#pragma once
#include "ptx.cuh"

namespace polymoe {

inline void products_fence() {}

inline void products_commit() {
    here.now->groups.push_back(here.now->open);
    here.now->open.clear();
}

template <int PENDING>
inline void products_wait() {
    auto& groups = here.now->groups;
    while (groups.size() > PENDING) {
        for (auto& mine : groups.front()) {
            emulator::meet_warp(&mine, [](void** with) {
                float* d[32];
                const uint32_t* a[32];
                for (int i = 0; i < 32; ++i) {
                    const auto* p = static_cast<emulator::Product*>(with[i]);
                    d[i] = p->d, a[i] = p->a;
                }
                const auto* p = static_cast<emulator::Product*>(with[0]);
                emulator::product(d, a, p->n, [&](int k, int n) {
                    const uint32_t address = p->b + n * 128 + k * 2;
                    const uint32_t swizzled = address ^ (address >> 7 & 7) << 4;
                    uint16_t v;
                    memcpy(&v, shared_at(swizzled / 16 * 16, 16) + swizzled % 16, 2);
                    return emulator::bfloat16(v);
                });
            });
        }
        groups.pop_front();
    }
}

inline uint64_t describe(uint32_t shared) { return shared; }

template <int N>
struct Product {
    static void add(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, static_cast<uint32_t>(b), N});
    }
};

}  // namespace polymoe
