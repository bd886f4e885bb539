// Stands in for the kernels' ptx/wgmma.cuh: a group is computed when it is waited for, as late as it may be.
#pragma once
#include "memory.cuh"

namespace polymoe {

inline void wgmma_fence() {}

inline void wgmma_commit() {
    here.now->groups.push_back(here.now->open);
    here.now->open.clear();
}

// An element of `bytes` bytes of the operand that a descriptor describes. Without swizzling, the upper half of a
// descriptor here has the distances of core matrices.
inline const uint8_t* described(uint64_t desc, int row, int k, int bytes) {
    const uint32_t start = static_cast<uint32_t>(desc), along_k = desc >> 32 & 0xFFFF;
    const uint32_t along_rows = desc >> 48, piece = 16 / bytes;
    uint32_t address;
    if (along_rows) {
        address = start + k / piece * along_k * 16 + row / 8 * along_rows * 16 + row % 8 * 16 + k % piece * bytes;
    } else {
        address = start + row * 128 + k * bytes;
        address ^= (address >> 7 & 7) << 4;
    }
    return smem_pointer(address / 16 * 16, 16) + address % 16;
}

inline float described_value(uint64_t desc, int row, int k, bool e4m3, bool float16 = false) {
    if (e4m3) return emulator::from_e4m3(*described(desc, row, k, 1));
    uint16_t v;
    memcpy(&v, described(desc, row, k, 2), 2);
    return float16 ? emulator::float16(v) : emulator::bfloat16(v);
}

template <int PENDING>
inline void wgmma_wait() {
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
                                    : described_value(p->shared_a, first + row, k, p->e4m3);
                    },
                    [&](int k, int n) { return described_value(p->b, n, k, p->e4m3, p->float16); }, p->e4m3 ? 32 : 16,
                    p->fresh);
            });
        }
        groups.erase(groups.begin());
    }
}

inline uint64_t make_smem_desc(uint32_t smem) { return smem; }
inline uint32_t smem_desc_units(uint32_t smem) { return smem / 16; }
inline uint64_t make_smem_desc_units(uint32_t units) { return make_smem_desc(units * 16); }
inline uint64_t make_smem_desc_no_swizzle(uint32_t smem, uint32_t along_k, uint32_t along_rows) {
    return smem | static_cast<uint64_t>(along_k / 16) << 32 | static_cast<uint64_t>(along_rows / 16) << 48;
}

template <int N>
struct WgmmaRS {
    static void add_bf16(float* d, const uint32_t (&a)[4], uint64_t b) { here.now->open.push_back({d, a, 0, b, N}); }
    static void add_f16(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, false, false, true});
    }
    static void set_f16(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, false, true, true});
    }
    static void add_e4m3(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, true});
    }
    static void set_e4m3(float* d, const uint32_t (&a)[4], uint64_t b) {
        here.now->open.push_back({d, a, 0, b, N, true, true});
    }
};

template <int N>
struct WgmmaSS {
    static void add_bf16(float* d, uint64_t a, uint64_t b) { here.now->open.push_back({d, nullptr, a, b, N}); }
    static void add_e4m3(float* d, uint64_t a, uint64_t b) { here.now->open.push_back({d, nullptr, a, b, N, true}); }
    static void set_e4m3(float* d, uint64_t a, uint64_t b) {
        here.now->open.push_back({d, nullptr, a, b, N, true, true});
    }
};

}  // namespace polymoe
