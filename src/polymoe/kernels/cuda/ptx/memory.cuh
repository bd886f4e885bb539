// Loads and stores with the widths and conditions that the kernels rely on. `smem` is a 32-bit shared-memory address.
#pragma once
#include <cstdint>

namespace polymoe {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes of global memory, or zeros. Volatile: loads stay in this order, ahead of what uses them.
__device__ __forceinline__ uint4 ld_global_v4_if(bool valid, const void* global) {
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("{\n.reg .pred valid;\nsetp.ne.s32 valid, %5, 0;\n@valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(global), "r"(static_cast<int>(valid))
                 : "memory");
    return v;
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t smem) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem));
    return v;
}

__device__ __forceinline__ uint2 ld_shared_v2(uint32_t smem) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem));
    return v;
}

__device__ __forceinline__ uint32_t ld_shared(uint32_t smem) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(smem));
    return v;
}

__device__ __forceinline__ void st_shared_v4(uint32_t smem, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t smem, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}

// Makes this thread's writes to shared memory visible to bulk copies and to wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t smem) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(smem));
    return v;
}

}  // namespace polymoe
