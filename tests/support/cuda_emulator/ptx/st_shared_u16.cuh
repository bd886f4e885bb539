// Stands in for the kernels' ptx/st_shared_u16.cuh.
#pragma once
#include "memory.cuh"

namespace polymoe {

inline void st_shared_u16(uint32_t smem, uint16_t v) { store_shared(smem, v); }

}  // namespace polymoe
