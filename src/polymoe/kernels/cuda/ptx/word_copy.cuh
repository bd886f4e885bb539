// Asynchronous copies of single words to shared memory. cp_async_mbarrier_arrive counts them, too.
#pragma once
#include <cstdint>

namespace polymoe {

// 4 bytes by this thread.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

}  // namespace polymoe
