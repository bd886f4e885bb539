// Asynchronous copies from global to shared memory.
#pragma once
#include <cstdint>

namespace polymoe {

// By the bulk copy engine. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy_g2s(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same for bytes that are read once: they leave the L2 cache first.
__device__ __forceinline__ void bulk_copy_g2s_evict_first(uint32_t smem, const void* global, uint32_t bytes,
                                                          uint32_t barrier) {
    const uint64_t evict_first = 0x12F0000000000000ull;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(smem),
        "l"(global), "r"(bytes), "r"(barrier), "l"(evict_first)
        : "memory");
}

// 16 bytes by this thread.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

// 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

// Arrives at the barrier when all copies by this thread so far have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace polymoe
