// What the compiler may assume of a value. These make no instruction of their own, or one at most.
#pragma once
#include <cstdint>

namespace polymoe {

// The same value, of which the compiler no longer knows how it was computed: it keeps the value in a register instead
// of computing it again.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
    asm volatile("mov.b32 %0, %0;" : "+r"(value));
    return value;
}

// The same value, which all lanes of the warp hold: the compiler may keep it, and what follows from it, in uniform
// registers.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// The value is computed here, not where it is used.
__device__ __forceinline__ void materialize(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }
__device__ __forceinline__ void materialize(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// VALUE, which the assembler does not know: it keeps a register for it instead of moving it to one for each use. No
// kernel has CTAs of several threads along z.
template <uint32_t VALUE>
__device__ __forceinline__ uint32_t opaque_constant() {
    uint32_t value;
    asm("{\n.reg .u32 z;\nmov.u32 z, %%tid.z;\nor.b32 %0, z, %1;\n}" : "=r"(value) : "n"(VALUE));
    return value;
}

}  // namespace polymoe
