// In place of the kernels' ptx.cuh.
#pragma once
#include "cuda.h"

namespace polymoe {

using emulator::here;

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - memory + emulator::kStart);
}

inline uint8_t* shared_at(uint32_t address, uint32_t bytes) {
    if (address < emulator::kStart || address + bytes > emulator::kStart + here.shared_bytes)
        emulator::fail("shared address %u beyond %d bytes", address - emulator::kStart, here.shared_bytes);
    if (address % bytes && bytes <= 16) emulator::fail("shared address %u, %u bytes: not aligned", address, bytes);
    return memory + (address - emulator::kStart);
}

inline uint32_t kept(uint32_t value) { return value; }
inline void made_here(uint32_t&) {}
inline void made_here(float&) {}
inline int of_warp(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }
inline void wait_for_previous_kernel() { here.waited = true; }
inline void let_next_kernel_start() {}

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
    here.barriers[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0};
}
inline void barrier_init_visible() {}
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    auto& b = emulator::barrier_at(barrier);
    b.bytes += bytes;
    if (--b.pending < 0) emulator::fail("more arrivals than a barrier expects");
    emulator::check_barrier(b);
    here.moved = true;
}
inline void barrier_arrive(uint32_t barrier) { barrier_arrive_expect(barrier, 0); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    auto& b = emulator::barrier_at(barrier);
    emulator::wait_until([&] { return (b.phase & 1) != parity; });
}
inline void named_barrier(int name, int threads) {
    emulator::meet(here.named[name], here.now->number, threads, nullptr, [](void**) {});
}

inline void copy_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    if (shared % 16 || bytes % 16 || bytes == 0 || reinterpret_cast<uintptr_t>(global) % 16)
        emulator::fail("a copy of %u bytes that is not aligned", bytes);
    const auto* from = static_cast<const uint8_t*>(global);
    for (const auto& [start, size] : here.ranges) {
        if (from >= start && from < start + size && from + bytes > start + size) emulator::fail("a copy from behind a tensor's end");
    }
    shared_at(shared, 16), shared_at(shared + bytes - 16, 16);
    auto* to = memory + (shared - emulator::kStart);
    memset(to, 0xFF, bytes);
    here.copies.push_back({to, from, bytes, barrier});
    here.moved = true;
}
inline void copy_bulk_once(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    copy_bulk(shared, global, bytes, barrier);
}

// They may land as late as the barrier allows, all of a thread together.
inline void copy_16(uint32_t shared, const void* global) {
    if (reinterpret_cast<uintptr_t>(global) % 16) emulator::fail("a copy of 16 bytes that is not aligned");
    uint8_t* to = shared_at(shared, 16);
    memset(to, 0xFF, 16);
    here.now->copies.push_back({to, static_cast<const uint8_t*>(global), 16, 0});
}
inline void barrier_arrive_with_copies(uint32_t barrier) {
    auto& copies = here.now->copies;
    if (!copies.empty()) {
        emulator::Copy together{nullptr, nullptr, 0, barrier, std::move(copies)};
        for (const auto& part : together.parts) together.bytes += part.bytes;
        copies.clear();
        emulator::barrier_at(barrier).bytes += together.bytes;
        here.copies.push_back(std::move(together));
    }
    barrier_arrive(barrier);
}

inline float power_of_2(float v) { return exp2f(v); }
inline float quotient(float a, float b) { return a / b; }
inline float lesser(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }
inline float greater(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }

inline uint4 load_16_if(bool there, const void* global) {
    return there ? *static_cast<const uint4*>(global) : uint4{};
}

template <class T>
inline T load_shared(uint32_t shared) {
    T v;
    memcpy(&v, shared_at(shared, sizeof(T)), sizeof(T));
    return v;
}
inline uint4 load_shared_16(uint32_t shared) { return load_shared<uint4>(shared); }
inline uint2 load_shared_8(uint32_t shared) { return load_shared<uint2>(shared); }
inline uint32_t load_shared_4(uint32_t shared) { return load_shared<uint32_t>(shared); }

template <class T>
inline void store_shared(uint32_t shared, T v) {
    memcpy(shared_at(shared, sizeof(T)), &v, sizeof(T));
}
inline void store_shared_16(uint32_t shared, uint4 v) { store_shared(shared, v); }
inline void store_shared_4(uint32_t shared, uint32_t v) { store_shared(shared, v); }
inline void shared_for_copies_and_products() {}

template <int COUNT>
inline void load_matrices(uint32_t (&r)[COUNT], uint32_t shared) {
    struct Brought { uint32_t shared; uint32_t* r; } mine{shared, r};
    emulator::meet_warp(&mine, [](void** with) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < COUNT; ++i) {
                const uint32_t row = static_cast<Brought*>(with[i * 8 + lane / 4])->shared;
                shared_at(row, 16);
                static_cast<Brought*>(with[lane])->r[i] = load_shared<uint32_t>(row + lane % 4 * 4);
            }
        }
    });
}
inline void load_matrices_4(uint32_t (&r)[4], uint32_t shared) { load_matrices<4>(r, shared); }
inline void load_matrices_2(uint32_t& r0, uint32_t& r1, uint32_t shared) {
    uint32_t r[2];
    load_matrices<2>(r, shared);
    r0 = r[0], r1 = r[1];
}

template <int COUNT>
inline void fewer_registers() {}
template <int COUNT>
inline void more_registers() {}

inline uint32_t pack_pair(float low, float high) {
    return emulator::to_bits(low) | static_cast<uint32_t>(emulator::to_bits(high)) << 16;
}
inline uint32_t times(uint32_t a, uint32_t s, int which) {
    const float f = emulator::half(s, which);
    return pack_pair(emulator::half(a, 0) * f, emulator::half(a, 1) * f);
}
inline uint32_t times_low(uint32_t a, uint32_t s) { return times(a, s, 0); }
inline uint32_t times_high(uint32_t a, uint32_t s) { return times(a, s, 1); }
inline uint32_t add_pairs(uint32_t a, uint32_t b) {
    return pack_pair(emulator::half(a, 0) + emulator::half(b, 0), emulator::half(a, 1) + emulator::half(b, 1));
}
inline uint16_t to_bfloat16(float v) { return emulator::to_bits(v); }
inline float from_bfloat16(uint16_t v) { return emulator::bfloat16(v); }
inline uint16_t to_float16(float v) {
    const _Float16 h = static_cast<_Float16>(v);
    uint16_t r;
    memcpy(&r, &h, 2);
    return r;
}
inline float from_float16(uint16_t v) {
    _Float16 h;
    memcpy(&h, &v, 2);
    return static_cast<float>(h);
}
template <int I>
uint32_t byte_of(uint32_t word) {
    return word >> 8 * I & 0xFF;
}
inline uint32_t bytes_of(uint2 bytes, uint32_t which) {
    const uint64_t all = bytes.x | static_cast<uint64_t>(bytes.y) << 32;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) r |= static_cast<uint32_t>(all >> (which >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return r;
}

inline uint32_t pack_bfloat16(float a, float b) { return pack_pair(a, b); }

inline uint32_t transposed(uint32_t v) {
    return of_lanes(static_cast<int>(v), [](int lane, auto of) {
        const int g = lane / 4, t = lane % 4;
        auto at = [&](int row) { return static_cast<uint32_t>(of(row * 4 + g / 2)) >> 16 * (g % 2) & 0xFFFF; };
        return static_cast<int>(at(2 * t) | at(2 * t + 1) << 16);
    });
}

inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Brought { float* c; const uint32_t* a; uint32_t b[2]; } mine{c, a, {b0, b1}};
    emulator::meet_warp(&mine, [](void** with) {
        float* d[32];
        const uint32_t* a[32];
        for (int i = 0; i < 32; ++i) d[i] = static_cast<Brought*>(with[i])->c, a[i] = static_cast<Brought*>(with[i])->a;
        emulator::product(
            d, 8, [&](int row, int k) { return emulator::of_registers(a, row, k); },
            [&](int k, int n) {
                return emulator::half(static_cast<Brought*>(with[n * 4 + k % 8 / 2])->b[k / 8], k % 2);
            });
    });
}

inline void multiply_add(float (&d)[4], const float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    multiply_add(d, a, b0, b1);
}

}  // namespace polymoe
