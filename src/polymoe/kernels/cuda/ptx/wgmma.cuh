// wgmma: a warpgroup's asynchronous matrix products, d[64 x N] = a[64 x K] * b[K x N], added to d or not.
//
// Each of the warpgroup's four warps holds 16 rows of d, and of a where that is in registers (WgmmaRS), as in mma.sync
// m16n8k16 and m16n8k32. b, and a of WgmmaSS, are in shared memory: rows of 128 bytes with 128-byte swizzling. Neither
// d nor an operand may be touched before the group that the instruction belongs to has been waited for.
#pragma once
#include <cstdint>

namespace polymoe {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are still running.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Matrix descriptors. Addresses in them count units of 16 bytes, so loops can keep those.
__device__ __forceinline__ uint32_t smem_desc_units(uint32_t smem) { return smem / 16 + (1u << 16); }

__device__ __forceinline__ uint64_t make_smem_desc_units(uint32_t units) {
    uint64_t desc;  // from two halves: no carry from the address, which is below 2^18
    asm("mov.b64 %0, {%1, %2};" : "=l"(desc) : "r"(units), "r"(1u << 30 | 64u));
    return desc;
}

// Of an operand that begins at a multiple of 1024 bytes, swizzled by 128 bytes. The next 32 bytes of each row, 16
// columns of 16-bit elements, are 32 bytes further on.
__device__ __forceinline__ uint64_t make_smem_desc(uint32_t smem) {
    return make_smem_desc_units(smem_desc_units(smem));
}

// Of an operand without swizzling: core matrices of 8 rows by 16 bytes; bytes from one to the next along K, and along
// rows.
__device__ __forceinline__ uint64_t make_smem_desc_no_swizzle(uint32_t smem, uint32_t along_k, uint32_t along_rows) {
    uint64_t desc;
    asm("mov.b64 %0, {%1, %2};" : "=l"(desc) : "r"((smem & 0x3FFFF) >> 4 | along_k >> 4 << 16), "r"(along_rows >> 4));
    return desc;
}

// a in registers. bfloat16 and float16 have K = 16, E4M3 has K = 32. `set` overwrites d.
template <int N>
struct WgmmaRS;

// Both in shared memory.
template <int N>
struct WgmmaSS;

// clang-format off
// The registers of d as text, eight at a time, and as operands.
#define POLYMOE_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define POLYMOE_R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define POLYMOE_R2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define POLYMOE_R3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define POLYMOE_R4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define POLYMOE_R5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define POLYMOE_R6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define POLYMOE_R7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define POLYMOE_R8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define POLYMOE_R9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define POLYMOE_R10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define POLYMOE_R11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define POLYMOE_R12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define POLYMOE_R13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define POLYMOE_R14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define POLYMOE_R15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define POLYMOE_R0_3 POLYMOE_R0 POLYMOE_R1 POLYMOE_R2 POLYMOE_R3
#define POLYMOE_R0_7 POLYMOE_R0_3 POLYMOE_R4 POLYMOE_R5 POLYMOE_R6 POLYMOE_R7
#define POLYMOE_R0_11 POLYMOE_R0_7 POLYMOE_R8 POLYMOE_R9 POLYMOE_R10 POLYMOE_R11
#define POLYMOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define POLYMOE_D8(i) POLYMOE_D4(i), POLYMOE_D4(i + 4)
#define POLYMOE_D16(i) POLYMOE_D8(i), POLYMOE_D8(i + 8)
#define POLYMOE_D32(i) POLYMOE_D16(i), POLYMOE_D16(i + 16)
#define POLYMOE_D64(i) POLYMOE_D32(i), POLYMOE_D32(i + 32)
#define POLYMOE_METHOD(NAME, A, A_OPERANDS, TYPES, D, A_TEXT, B, FLAGS, ...)                                          \
    static __device__ __forceinline__ void NAME(float* d, A, uint64_t b) {                                            \
        asm volatile("wgmma.mma_async.sync.aligned." TYPES " {" D "}, " A_TEXT ", " B ", " FLAGS ";"                  \
                     : __VA_ARGS__                                                                                    \
                     : A_OPERANDS, "l"(b));                                                                           \
    }
#define POLYMOE_A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define POLYMOE_RS(NAME, TYPES, D, A, ...)                                                                            \
    POLYMOE_METHOD(NAME, const uint32_t(&a)[4], POLYMOE_A_REGISTERS, TYPES, D, "{" A "}", __VA_ARGS__)
#define POLYMOE_SS(NAME, ...) POLYMOE_METHOD(NAME, uint64_t a, "l"(a), __VA_ARGS__)
// A0 and further numbers: the operands behind d. Where both are in shared memory, A1 is that of b.
#define POLYMOE_WGMMA(N, D, A0, A1, A2, A3, B, ...)                                                                   \
    template <>                                                                                                       \
    struct WgmmaRS<N> {                                                                                               \
        POLYMOE_RS(add_bf16, "m64n" #N "k16.f32.bf16.bf16", D, A0 ", " A1 ", " A2 ", " A3, B, "1, 1, 1, 0", __VA_ARGS__) \
        POLYMOE_RS(set_f16, "m64n" #N "k16.f32.f16.f16", D, A0 ", " A1 ", " A2 ", " A3, B, "0, 1, 1, 0", __VA_ARGS__) \
        POLYMOE_RS(add_f16, "m64n" #N "k16.f32.f16.f16", D, A0 ", " A1 ", " A2 ", " A3, B, "1, 1, 1, 0", __VA_ARGS__) \
        POLYMOE_RS(set_e4m3, "m64n" #N "k32.f32.e4m3.e4m3", D, A0 ", " A1 ", " A2 ", " A3, B, "0, 1, 1", __VA_ARGS__) \
        POLYMOE_RS(add_e4m3, "m64n" #N "k32.f32.e4m3.e4m3", D, A0 ", " A1 ", " A2 ", " A3, B, "1, 1, 1", __VA_ARGS__) \
    };                                                                                                                \
    template <>                                                                                                       \
    struct WgmmaSS<N> {                                                                                               \
        POLYMOE_SS(add_bf16, "m64n" #N "k16.f32.bf16.bf16", D, A0, A1, "1, 1, 1, 0, 0", __VA_ARGS__)                  \
        POLYMOE_SS(set_e4m3, "m64n" #N "k32.f32.e4m3.e4m3", D, A0, A1, "0, 1, 1", __VA_ARGS__)                        \
        POLYMOE_SS(add_e4m3, "m64n" #N "k32.f32.e4m3.e4m3", D, A0, A1, "1, 1, 1", __VA_ARGS__)                        \
    };

POLYMOE_WGMMA(8, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", POLYMOE_D4(0))
POLYMOE_WGMMA(16, POLYMOE_R0, "%8", "%9", "%10", "%11", "%12", POLYMOE_D8(0))
POLYMOE_WGMMA(24, POLYMOE_R0 ", %8, %9, %10, %11", "%12", "%13", "%14", "%15", "%16", POLYMOE_D8(0), POLYMOE_D4(8))
POLYMOE_WGMMA(32, POLYMOE_R0 POLYMOE_R1, "%16", "%17", "%18", "%19", "%20", POLYMOE_D16(0))
POLYMOE_WGMMA(48, POLYMOE_R0 POLYMOE_R1 POLYMOE_R2, "%24", "%25", "%26", "%27", "%28", POLYMOE_D16(0), POLYMOE_D8(16))
POLYMOE_WGMMA(56, POLYMOE_R0 POLYMOE_R1 POLYMOE_R2 ", %24, %25, %26, %27", "%28", "%29", "%30", "%31", "%32",
              POLYMOE_D16(0), POLYMOE_D8(16), POLYMOE_D4(24))
POLYMOE_WGMMA(64, POLYMOE_R0_3, "%32", "%33", "%34", "%35", "%36", POLYMOE_D32(0))
POLYMOE_WGMMA(80, POLYMOE_R0_3 POLYMOE_R4, "%40", "%41", "%42", "%43", "%44", POLYMOE_D32(0), POLYMOE_D8(32))
POLYMOE_WGMMA(96, POLYMOE_R0_3 POLYMOE_R4 POLYMOE_R5, "%48", "%49", "%50", "%51", "%52",
              POLYMOE_D32(0), POLYMOE_D16(32))
POLYMOE_WGMMA(112, POLYMOE_R0_3 POLYMOE_R4 POLYMOE_R5 POLYMOE_R6, "%56", "%57", "%58", "%59", "%60",
              POLYMOE_D32(0), POLYMOE_D16(32), POLYMOE_D8(48))
POLYMOE_WGMMA(128, POLYMOE_R0_7, "%64", "%65", "%66", "%67", "%68", POLYMOE_D64(0))
POLYMOE_WGMMA(160, POLYMOE_R0_7 POLYMOE_R8 POLYMOE_R9, "%80", "%81", "%82", "%83", "%84",
              POLYMOE_D64(0), POLYMOE_D16(64))
POLYMOE_WGMMA(192, POLYMOE_R0_11, "%96", "%97", "%98", "%99", "%100", POLYMOE_D64(0), POLYMOE_D32(64))
POLYMOE_WGMMA(224, POLYMOE_R0_11 POLYMOE_R12 POLYMOE_R13, "%112", "%113", "%114", "%115", "%116",
              POLYMOE_D64(0), POLYMOE_D32(64), POLYMOE_D16(96))
POLYMOE_WGMMA(256, POLYMOE_R0_11 POLYMOE_R12 POLYMOE_R13 POLYMOE_R14 POLYMOE_R15,
              "%128", "%129", "%130", "%131", "%132", POLYMOE_D64(0), POLYMOE_D64(64))
// clang-format on

#undef POLYMOE_METHOD
#undef POLYMOE_RS
#undef POLYMOE_SS
#undef POLYMOE_WGMMA

}  // namespace polymoe
