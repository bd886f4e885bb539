// A store of two bytes to shared memory.
#pragma once
#include <cstdint>

namespace polymoe {

__device__ __forceinline__ void st_shared_u16(uint32_t smem, uint16_t v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(smem), "h"(v) : "memory");
}

}  // namespace polymoe
