// Stands in for the kernels' ptx/compiler.cuh.
#pragma once
#include "../cuda.h"

namespace polymoe {

inline uint32_t opaque(uint32_t value) { return value; }
inline int warp_uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }
inline void materialize(uint32_t&) {}
inline void materialize(float&) {}

template <uint32_t VALUE>
uint32_t opaque_constant() {
    return VALUE;
}

}  // namespace polymoe
