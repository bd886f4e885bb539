// wgmma of E4M3 with both operands in shared memory: as WgmmaSS, with K = 32. `set` overwrites d.
#pragma once
#include "wgmma.cuh"

namespace polymoe {

template <int N>
struct WgmmaE4m3;

#define POLYMOE_METHOD(NAME, SCALE_D)                                                                              \
    static __device__ __forceinline__ void NAME(float* d, uint64_t a, uint64_t b) {                                \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" POLYMOE_R03 "}, %64, %65, " SCALE_D \
                     ", 1, 1;"                                                                                     \
                     : POLYMOE_D64(0)                                                                              \
                     : "l"(a), "l"(b));                                                                            \
    }

template <>
struct WgmmaE4m3<128> {
    POLYMOE_METHOD(set, "0")
    POLYMOE_METHOD(add, "1")
};

#undef POLYMOE_METHOD

}  // namespace polymoe
