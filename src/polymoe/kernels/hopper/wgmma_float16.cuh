// m64nNk16 products of the matrix units of float16, with the left operand in registers, and e4m3 codes as float16: every
// e4m3 number is one. For the rest see wgmma.cuh.
#pragma once
#include "wgmma.cuh"

namespace polymoe {

// The two e4m3 codes in the low, or the high, half of a word, as a pair of float16.
__device__ __forceinline__ uint32_t low_codes(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(r) : "r"(word));
    return r;
}

__device__ __forceinline__ uint32_t high_codes(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(r) : "r"(word));
    return r;
}

// `set` leaves aside what d was.
template <int N>
struct Float16Product;

#define POLYMOE_FLOAT16_STEP(NAME, TEXT, ...)                                                          \
    static __device__ __forceinline__ void NAME(float* d, const uint32_t (&a)[4], uint64_t b) {        \
        asm volatile("wgmma.mma_async.sync.aligned." TEXT                                              \
                     : __VA_ARGS__                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
    }
#define POLYMOE_FLOAT16_PRODUCT(N, D, AB, ...)                                                                \
    template <>                                                                                               \
    struct Float16Product<N> {                                                                                \
        POLYMOE_FLOAT16_STEP(add, "m64n" #N "k16.f32.f16.f16 {" D "}, " AB ", 1, 1, 1, 0;", __VA_ARGS__)        \
        POLYMOE_FLOAT16_STEP(set, "m64n" #N "k16.f32.f16.f16 {" D "}, " AB ", 0, 1, 1, 0;", __VA_ARGS__)        \
    }

POLYMOE_FLOAT16_PRODUCT(8, "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8", POLYMOE_D4(0));
POLYMOE_FLOAT16_PRODUCT(16, "%0, %1, %2, %3, %4, %5, %6, %7", "{%8, %9, %10, %11}, %12", POLYMOE_D8(0));
POLYMOE_FLOAT16_PRODUCT(32, POLYMOE_R0, "{%16, %17, %18, %19}, %20", POLYMOE_D16(0));
POLYMOE_FLOAT16_PRODUCT(48, POLYMOE_R0 ", %16, %17, %18, %19, %20, %21, %22, %23",
                        "{%24, %25, %26, %27}, %28", POLYMOE_D16(0), POLYMOE_D8(16));
POLYMOE_FLOAT16_PRODUCT(64, POLYMOE_R0 POLYMOE_R1, "{%32, %33, %34, %35}, %36", POLYMOE_D32(0));
POLYMOE_FLOAT16_PRODUCT(80, POLYMOE_R0 POLYMOE_R1 ", %32, %33, %34, %35, %36, %37, %38, %39",
                        "{%40, %41, %42, %43}, %44", POLYMOE_D32(0), POLYMOE_D8(32));
POLYMOE_FLOAT16_PRODUCT(96, POLYMOE_R0 POLYMOE_R1 POLYMOE_R2, "{%48, %49, %50, %51}, %52", POLYMOE_D32(0),
                        POLYMOE_D16(32));
POLYMOE_FLOAT16_PRODUCT(128, POLYMOE_R03, "{%64, %65, %66, %67}, %68", POLYMOE_D64(0));

#undef POLYMOE_FLOAT16_PRODUCT
#undef POLYMOE_FLOAT16_STEP

}  // namespace polymoe
