// In place of the kernels' wgmma_shared.cuh.
#pragma once
#include "wgmma.cuh"

namespace polymoe {

// A description without swizzle has its distances in the upper half.
inline uint64_t describe_pieces(uint32_t shared, uint32_t along_k, uint32_t along_rows) {
    return shared | static_cast<uint64_t>(along_k / 16) << 32 | static_cast<uint64_t>(along_rows / 16) << 48;
}

template <int N>
struct SharedProduct {
    static void add(float* d, uint64_t a, uint64_t b) { here.now->open.push_back({d, nullptr, a, b, N}); }
    static void add_e4m3(float* d, uint64_t a, uint64_t b) { here.now->open.push_back({d, nullptr, a, b, N, true}); }
    static void set_e4m3(float* d, uint64_t a, uint64_t b) { here.now->open.push_back({d, nullptr, a, b, N, true, true}); }
};

}  // namespace polymoe
