// Products of the matrix units (wgmma), both operands in shared memory: d[64 x N] += a[64 x 16] * b[16 x N], of bfloat16.
// Asynchronous: neither d nor shared memory may be touched before they have been waited for.
//
// Both operands are rows of up to 128 bytes, swizzled by 128 bytes: `describe` in wgmma.cuh; 32 bytes further on are the
// next 16 columns. Or pieces of 8 rows by 16 bytes, one after the other: `describe_pieces`.
#pragma once
#include "wgmma.cuh"

namespace polymoe {

// Pieces of 8 rows by 16 bytes: from one to the next along K, and to the next 8 rows, in bytes.
__device__ __forceinline__ uint64_t describe_pieces(uint32_t shared, uint32_t along_k, uint32_t along_rows) {
    uint64_t description;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(description)
        : "r"((shared & 0x3FFFF) >> 4 | along_k >> 4 << 16), "r"(along_rows >> 4));
    return description;
}

template <int N>
struct SharedProduct;

#define POLYMOE_SHARED_PRODUCT(N, D, AB, ...)                                                                           \
    template <>                                                                                                         \
    struct SharedProduct<N> {                                                                                           \
        static __device__ __forceinline__ void add(float* d, uint64_t a, uint64_t b) {                                  \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D "}, " AB ", 1, 1, 1, 0, 0;"     \
                         : __VA_ARGS__                                                                                  \
                         : "l"(a), "l"(b));                                                                             \
        }                                                                                                               \
    }

POLYMOE_SHARED_PRODUCT(8, "%0, %1, %2, %3", "%4, %5", POLYMOE_D4(0));
POLYMOE_SHARED_PRODUCT(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9", POLYMOE_D8(0));
POLYMOE_SHARED_PRODUCT(24, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11",
                       "%12, %13", POLYMOE_D8(0), POLYMOE_D4(8));
POLYMOE_SHARED_PRODUCT(32, POLYMOE_R0, "%16, %17", POLYMOE_D16(0));
POLYMOE_SHARED_PRODUCT(48, POLYMOE_R0 ", %16, %17, %18, %19, %20, %21, %22, %23",
                       "%24, %25", POLYMOE_D16(0), POLYMOE_D8(16));
POLYMOE_SHARED_PRODUCT(64, POLYMOE_R0 POLYMOE_R1, "%32, %33", POLYMOE_D32(0));
POLYMOE_SHARED_PRODUCT(96, POLYMOE_R0 POLYMOE_R1 POLYMOE_R2, "%48, %49", POLYMOE_D32(0), POLYMOE_D16(32));
POLYMOE_SHARED_PRODUCT(128, POLYMOE_R03, "%64, %65", POLYMOE_D64(0));
POLYMOE_SHARED_PRODUCT(160, POLYMOE_R03 POLYMOE_R4, "%80, %81", POLYMOE_D64(0), POLYMOE_D16(64));
POLYMOE_SHARED_PRODUCT(192, POLYMOE_R03 POLYMOE_R4 POLYMOE_R5, "%96, %97", POLYMOE_D64(0), POLYMOE_D32(64));
POLYMOE_SHARED_PRODUCT(224, POLYMOE_R03 POLYMOE_R4 POLYMOE_R5 POLYMOE_R6,
                       "%112, %113", POLYMOE_D64(0), POLYMOE_D32(64), POLYMOE_D16(96));
POLYMOE_SHARED_PRODUCT(256, POLYMOE_R03 POLYMOE_R4 POLYMOE_R5 POLYMOE_R6 POLYMOE_R7,
                       "%128, %129", POLYMOE_D64(0), POLYMOE_D64(64));

#undef POLYMOE_SHARED_PRODUCT

}  // namespace polymoe
