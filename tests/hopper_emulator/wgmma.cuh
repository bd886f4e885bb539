// In place of the kernels' wgmma.cuh: products happen when their group is waited for, as late as they may.
#pragma once
#include "ptx.cuh"

namespace polymoe {

inline void products_fence() {}

inline void products_commit() {
    here.now->groups.push_back(here.now->open);
    here.now->open.clear();
}

// A row's bfloat16 in what `description` describes.
inline float described(uint64_t description, int row, int k) {
    const uint32_t start = static_cast<uint32_t>(description), along_k = description >> 32 & 0xFFFF;
    const uint32_t along_rows = description >> 48;
    uint32_t address;
    if (along_rows) {
        address = start + k / 8 * along_k * 16 + row / 8 * along_rows * 16 + row % 8 * 16 + k % 8 * 2;
    } else {
        address = start + row * 128 + k * 2;
        address ^= (address >> 7 & 7) << 4;
    }
    uint16_t v;
    memcpy(&v, shared_at(address, 2), 2);
    return emulator::bfloat16(v);
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
                const int first = here.now->number / 32 % 4 * 16;  // of the warpgroup's rows
                emulator::product(
                    d, p->n,
                    [&](int row, int k) {
                        return p->a ? emulator::of_registers(a, row, k) : described(p->shared_a, first + row, k);
                    },
                    [&](int k, int n) { return described(p->b, n, k); });
            });
        }
        groups.pop_front();
    }
}

inline uint64_t describe(uint32_t shared) { return shared; }
inline uint32_t in_units(uint32_t shared) { return shared / 16; }
inline uint64_t describe_units(uint32_t units) { return describe(units * 16); }

template <int N>
struct Product {
    static void add(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N});
    }
};

}  // namespace polymoe
