// Constants in registers.
#pragma once
#include <cstdint>

namespace polymoe {

// VALUE, which the assembler does not know: it keeps a register for it instead of moving it to one for each use. No
// kernel has CTAs of several threads along z.
template <uint32_t VALUE>
__device__ __forceinline__ uint32_t opaque_constant() {
    uint32_t value;
    asm("{\n.reg .u32 z;\nmov.u32 z, %%tid.z;\nor.b32 %0, z, %1;\n}" : "=r"(value) : "n"(VALUE));
    return value;
}

}  // namespace polymoe
