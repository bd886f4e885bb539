// m64nNk16 products of the matrix units with the left operand in registers: d[64 x N] += a[64 x 16] * b[16 x N] of
// bfloat16 (`add`) or float16, and m64nNk32 of e4m3, added or set. A warpgroup's four warps hold 16 rows each, as in m16n8k16 and
// m16n8k32; b is in shared memory, N rows of 128 bytes, swizzled by 128 bytes. Asynchronous: neither d nor a may be touched before the group they belong to has been waited for.
#pragma once
#include <cstdint>

namespace polymoe {

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are under way.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Descriptions of b count shared memory in units of 16 bytes.
__device__ __forceinline__ uint32_t in_units(uint32_t shared) { return shared / 16 + (1u << 16); }

__device__ __forceinline__ uint64_t describe_units(uint32_t units) {
    uint64_t description;  // of two halves: no carry from the address, which is below 2^18
    asm("mov.b64 %0, {%1, %2};" : "=l"(description) : "r"(units), "r"(1u << 30 | 64u));
    return description;
}

// Describes b for a tile that starts at a multiple of 1024 bytes; 32 bytes further on are the next 16 columns.
__device__ __forceinline__ uint64_t describe(uint32_t shared) { return describe_units(in_units(shared)); }

template <int N>
struct Product;

// The registers of d: as text, and as operands.
#define POLYMOE_R0 "%0, %1, %2, %3, %4, %5, %6, %7" \
                   ", %8, %9, %10, %11, %12, %13, %14, %15"
#define POLYMOE_R1 ", %16, %17, %18, %19, %20, %21, %22, %23" \
                   ", %24, %25, %26, %27, %28, %29, %30, %31"
#define POLYMOE_R2 ", %32, %33, %34, %35, %36, %37, %38, %39" \
                   ", %40, %41, %42, %43, %44, %45, %46, %47"
#define POLYMOE_R3 ", %48, %49, %50, %51, %52, %53, %54, %55" \
                   ", %56, %57, %58, %59, %60, %61, %62, %63"
#define POLYMOE_R4 ", %64, %65, %66, %67, %68, %69, %70, %71" \
                   ", %72, %73, %74, %75, %76, %77, %78, %79"
#define POLYMOE_R5 ", %80, %81, %82, %83, %84, %85, %86, %87" \
                   ", %88, %89, %90, %91, %92, %93, %94, %95"
#define POLYMOE_R6 ", %96, %97, %98, %99, %100, %101, %102, %103" \
                   ", %104, %105, %106, %107, %108, %109, %110, %111"
#define POLYMOE_R7 ", %112, %113, %114, %115, %116, %117, %118, %119" \
                   ", %120, %121, %122, %123, %124, %125, %126, %127"
#define POLYMOE_R03 POLYMOE_R0 POLYMOE_R1 POLYMOE_R2 POLYMOE_R3
#define POLYMOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define POLYMOE_D8(i) POLYMOE_D4(i), POLYMOE_D4(i + 4)
#define POLYMOE_D16(i) POLYMOE_D8(i), POLYMOE_D8(i + 8)
#define POLYMOE_D32(i) POLYMOE_D16(i), POLYMOE_D16(i + 16)
#define POLYMOE_D64(i) POLYMOE_D32(i), POLYMOE_D32(i + 32)
#define POLYMOE_METHOD(NAME, TEXT, ...)                                                            \
    static __device__ __forceinline__ void NAME(float* d, const uint32_t (&a)[4], uint64_t b) {    \
        asm volatile("wgmma.mma_async.sync.aligned." TEXT                                          \
                     : __VA_ARGS__                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
    }
#define POLYMOE_PRODUCT(N, D, AB, ...)                                                                    \
    template <>                                                                                           \
    struct Product<N> {                                                                                   \
        POLYMOE_METHOD(add, "m64n" #N "k16.f32.bf16.bf16 {" D "}, " AB ", 1, 1, 1, 0;", __VA_ARGS__)       \
        POLYMOE_METHOD(set_float16, "m64n" #N "k16.f32.f16.f16 {" D "}, " AB ", 0, 1, 1, 0;", __VA_ARGS__) \
        POLYMOE_METHOD(add_float16, "m64n" #N "k16.f32.f16.f16 {" D "}, " AB ", 1, 1, 1, 0;", __VA_ARGS__) \
        POLYMOE_METHOD(set_e4m3, "m64n" #N "k32.f32.e4m3.e4m3 {" D "}, " AB ", 0, 1, 1;", __VA_ARGS__)     \
        POLYMOE_METHOD(add_e4m3, "m64n" #N "k32.f32.e4m3.e4m3 {" D "}, " AB ", 1, 1, 1;", __VA_ARGS__)     \
    }

POLYMOE_PRODUCT(8, "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8", POLYMOE_D4(0));
POLYMOE_PRODUCT(16, "%0, %1, %2, %3, %4, %5, %6, %7", "{%8, %9, %10, %11}, %12", POLYMOE_D8(0));
POLYMOE_PRODUCT(24, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11",
                "{%12, %13, %14, %15}, %16", POLYMOE_D8(0), POLYMOE_D4(8));
POLYMOE_PRODUCT(32, POLYMOE_R0, "{%16, %17, %18, %19}, %20", POLYMOE_D16(0));
POLYMOE_PRODUCT(48, POLYMOE_R0 ", %16, %17, %18, %19, %20, %21, %22, %23",
                "{%24, %25, %26, %27}, %28", POLYMOE_D16(0), POLYMOE_D8(16));
POLYMOE_PRODUCT(56, POLYMOE_R0 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27",
                "{%28, %29, %30, %31}, %32", POLYMOE_D16(0), POLYMOE_D8(16), POLYMOE_D4(24));
POLYMOE_PRODUCT(64, POLYMOE_R0 POLYMOE_R1, "{%32, %33, %34, %35}, %36", POLYMOE_D32(0));
POLYMOE_PRODUCT(80, POLYMOE_R0 POLYMOE_R1 ", %32, %33, %34, %35, %36, %37, %38, %39",
                "{%40, %41, %42, %43}, %44", POLYMOE_D32(0), POLYMOE_D8(32));
POLYMOE_PRODUCT(96, POLYMOE_R0 POLYMOE_R1 POLYMOE_R2, "{%48, %49, %50, %51}, %52", POLYMOE_D32(0), POLYMOE_D16(32));
POLYMOE_PRODUCT(112, POLYMOE_R0 POLYMOE_R1 POLYMOE_R2 ", %48, %49, %50, %51, %52, %53, %54, %55",
                "{%56, %57, %58, %59}, %60", POLYMOE_D32(0), POLYMOE_D16(32), POLYMOE_D8(48));
POLYMOE_PRODUCT(128, POLYMOE_R03, "{%64, %65, %66, %67}, %68", POLYMOE_D64(0));
POLYMOE_PRODUCT(160, POLYMOE_R03 POLYMOE_R4, "{%80, %81, %82, %83}, %84", POLYMOE_D64(0), POLYMOE_D16(64));
POLYMOE_PRODUCT(192, POLYMOE_R03 POLYMOE_R4 POLYMOE_R5, "{%96, %97, %98, %99}, %100", POLYMOE_D64(0), POLYMOE_D32(64));
POLYMOE_PRODUCT(224, POLYMOE_R03 POLYMOE_R4 POLYMOE_R5 POLYMOE_R6,
                "{%112, %113, %114, %115}, %116", POLYMOE_D64(0), POLYMOE_D32(64), POLYMOE_D16(96));
POLYMOE_PRODUCT(256, POLYMOE_R03 POLYMOE_R4 POLYMOE_R5 POLYMOE_R6 POLYMOE_R7,
                "{%128, %129, %130, %131}, %132", POLYMOE_D64(0), POLYMOE_D64(64));

}  // namespace polymoe
