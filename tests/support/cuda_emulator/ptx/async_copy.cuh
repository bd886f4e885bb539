// Stands in for the kernels' ptx/async_copy.cuh: copies land late and in any order, and poison what they overwrite at
// once.
#pragma once
#include "mbarrier.cuh"

namespace polymoe {

inline void check_copy(const uint8_t* from, uint32_t bytes, uint32_t multiple = 16) {
    if (bytes % multiple || bytes == 0 || reinterpret_cast<uintptr_t>(from) % multiple)
        emulator::fail("a copy of %u bytes that is not aligned", bytes);
    for (const auto& [start, size] : here.ranges) {
        if (from >= start && from < start + size && from + bytes > start + size)
            emulator::fail("a copy from beyond a tensor's end");
    }
}

inline void bulk_copy_g2s(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    const auto* from = static_cast<const uint8_t*>(global);
    check_copy(from, bytes);
    smem_pointer(smem, 16), smem_pointer(smem + bytes - 16, 16);
    auto* to = memory + (smem - emulator::kStart);
    memset(to, 0xFF, bytes);
    here.copies.push_back({to, from, bytes, barrier});
    here.moved = here.copied = true;
}
inline void bulk_copy_g2s_evict_first(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    bulk_copy_g2s(smem, global, bytes, barrier);
}

// They may land as late as the barrier allows, all of a thread together.
template <uint32_t BYTES>
inline void cp_async(uint32_t smem, const void* global) {
    check_copy(static_cast<const uint8_t*>(global), BYTES, BYTES);
    uint8_t* to = smem_pointer(smem, BYTES);
    memset(to, 0xFF, BYTES);
    here.now->copies.push_back({to, static_cast<const uint8_t*>(global), BYTES, 0});
}
inline void cp_async_4(uint32_t smem, const void* global) { cp_async<4>(smem, global); }
inline void cp_async_16(uint32_t smem, const void* global) { cp_async<16>(smem, global); }
inline void cp_async_mbarrier_arrive(uint32_t barrier) {
    auto& copies = here.now->copies;
    if (!copies.empty()) {
        emulator::Copy together{nullptr, nullptr, 0, barrier, std::move(copies)};
        for (const auto& part : together.parts) together.bytes += part.bytes;
        copies.clear();
        emulator::barrier_at(barrier).bytes += together.bytes;
        here.copies.push_back(std::move(together)), here.copied = true;
    }
    mbarrier_arrive(barrier);
}

}  // namespace polymoe
