// In place of the kernels' wgmma.cuh: products happen when their group is waited for, as late as they may.
#pragma once
#include "ptx.cuh"

namespace polymoe {

inline void products_fence() {}

inline void products_commit() {
    here.now->groups.push_back(here.now->open);
    here.now->open.clear();
}

// A row's element of `bytes` bytes in what `description` describes.
inline const uint8_t* described(uint64_t description, int row, int k, int bytes) {
    const uint32_t start = static_cast<uint32_t>(description), along_k = description >> 32 & 0xFFFF;
    const uint32_t along_rows = description >> 48, piece = 16 / bytes;
    uint32_t address;
    if (along_rows) {
        address = start + k / piece * along_k * 16 + row / 8 * along_rows * 16 + row % 8 * 16 + k % piece * bytes;
    } else {
        address = start + row * 128 + k * bytes;
        address ^= (address >> 7 & 7) << 4;
    }
    return shared_at(address / 16 * 16, 16) + address % 16;
}

inline float described_number(uint64_t description, int row, int k, bool e4m3, bool float16 = false) {
    if (e4m3) return emulator::from_e4m3(*described(description, row, k, 1));
    uint16_t v;
    memcpy(&v, described(description, row, k, 2), 2);
    return float16 ? emulator::float16(v) : emulator::bfloat16(v);
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
                        return p->a ? emulator::of_registers(a, row, k, p->e4m3, p->float16)
                                    : described_number(p->shared_a, first + row, k, p->e4m3);
                    },
                    [&](int k, int n) { return described_number(p->b, n, k, p->e4m3, p->float16); }, p->e4m3 ? 32 : 16, p->fresh);
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
    static void add_float16(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, false, false, true});
    }
    static void set_float16(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, false, true, true});
    }
    static void add_e4m3(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, true});
    }
    static void set_e4m3(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, true, true});
    }
};

}  // namespace polymoe
