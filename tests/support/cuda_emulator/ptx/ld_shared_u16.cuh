// Stands in for the kernels' ptx/ld_shared_u16.cuh.
#pragma once
#include "memory.cuh"

namespace polymoe {

inline uint32_t ld_shared_u16(uint32_t smem) { return load_shared<uint16_t>(smem); }

}  // namespace polymoe
