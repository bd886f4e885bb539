// The instructions that C++ has no words for. Addresses named `shared` are shared-memory addresses of 32 bits.
#pragma once
#include <cstdint>

namespace polymoe {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same number, of which the compiler no longer knows how it was made: it keeps it instead of making it again.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
    asm volatile("mov.b32 %0, %0;" : "+r"(value));
    return value;
}

// The same number, which all lanes of the warp hold: the compiler may then keep it, and what is made of it, once a warp.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// The number is made here, not where it is used.
__device__ __forceinline__ void made_here(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }
__device__ __forceinline__ void made_here(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// ---- programmatic dependent launch: wait until the kernel before has finished; let the next one start.

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- mbarriers

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Named barrier of `threads` threads.
__device__ __forceinline__ void named_barrier(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ---- copies by the bulk engine; `bytes` and both addresses are multiples of 16

__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// The same for bytes that are read once: they leave the L2 cache first.
__device__ __forceinline__ void copy_bulk_once(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    const uint64_t evict_first = 0x12F0000000000000ull;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier), "l"(evict_first)
        : "memory");
}

// ---- copies of 16 bytes by the threads themselves

__device__ __forceinline__ void copy_16(uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Arrives when all such copies of this thread so far have landed.
__device__ __forceinline__ void barrier_arrive_with_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- global memory to registers

// 16 bytes, or zeros. Loads stay in this order, in front of what uses them.
__device__ __forceinline__ uint4 load_16_if(bool there, const void* global) {
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %5, 0;\n@there ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(global), "r"(static_cast<int>(there))
                 : "memory");
    return v;
}

// ---- shared memory to registers

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared));
    return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t shared) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared));
    return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(shared));
    return v;
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(v) : "memory");
}

// What this thread has written to shared memory is there for bulk copies and for products of the matrix units.
__device__ __forceinline__ void shared_for_copies_and_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices_4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared));
}

__device__ __forceinline__ void load_matrices_2(uint32_t& r0, uint32_t& r1, uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(shared));
}

// ---- registers of the warps of a warpgroup, from and to the block's pool

template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- pairs of bfloat16 in 32 bits

// Both halves of a times the low, or the high, half of s.
__device__ __forceinline__ uint32_t times_low(uint32_t a, uint32_t s) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\n.reg .b32 f;\nmov.b32 {l, h}, %2;\nmov.b32 f, {l, l};\nmul.rn.bf16x2 %0, %1, f;\n}"
        : "=r"(r)
        : "r"(a), "r"(s));
    return r;
}

__device__ __forceinline__ uint32_t times_high(uint32_t a, uint32_t s) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\n.reg .b32 f;\nmov.b32 {l, h}, %2;\nmov.b32 f, {h, h};\nmul.rn.bf16x2 %0, %1, f;\n}"
        : "=r"(r)
        : "r"(a), "r"(s));
    return r;
}

__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// ---- bytes in 32 bits

template <int I>
__device__ __forceinline__ uint32_t byte_of(uint32_t word) {
    uint32_t r;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(word), "n"(0x4440 + I));
    return r;
}

// Four of eight bytes, by the four lowest digits of `which`: 0 to 7 each.
__device__ __forceinline__ uint32_t bytes_of(uint2 bytes, uint32_t which) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(bytes.x), "r"(bytes.y), "r"(which));
    return r;
}

// ---- float32, quick: the last bits may differ

__device__ __forceinline__ float power_of_2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// 0 where b is above 2^126.
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }

// Of two numbers, where not a number stays not a number.
__device__ __forceinline__ float lesser(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float greater(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// ---- 16-bit numbers as bits

__device__ __forceinline__ uint16_t to_bfloat16(float v) {
    uint16_t r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float from_bfloat16(uint16_t v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }

__device__ __forceinline__ uint16_t to_float16(float v) {
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float from_float16(uint16_t v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
    return r;
}

// a in the low half.
__device__ __forceinline__ uint32_t pack_bfloat16(float a, float b) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

// An 8x8 matrix of 16-bit numbers, of which lane 4g + t holds row g and columns 2t and 2t + 1, with rows and columns
// exchanged.
__device__ __forceinline__ uint32_t transposed(uint32_t v) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// ---- matrix units: d[16 x 8] = c + a[16 x 16] * b[16 x 8] in bfloat16

__device__ __forceinline__ void multiply_add(
    float (&d)[4], const float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add(c, c, a, b0, b1);
}

}  // namespace polymoe
