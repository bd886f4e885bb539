#pragma once
#include <cstdint>

namespace polymoe {

__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t smem) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(smem));
    return v;
}

}  // namespace polymoe
