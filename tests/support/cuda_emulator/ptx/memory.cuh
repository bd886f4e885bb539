// Stands in for the kernels' ptx/memory.cuh.
#pragma once
#include "../cuda.h"

namespace polymoe {

using emulator::here;

inline uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - memory + emulator::kStart);
}

// Checks that an access stays within the kernel's shared memory and is aligned.
inline uint8_t* smem_pointer(uint32_t address, uint32_t bytes) {
    if (address < emulator::kStart || address + bytes > emulator::kStart + here.shared_bytes)
        emulator::fail("shared address %u beyond %d bytes", address - emulator::kStart, here.shared_bytes);
    if (address % bytes && bytes <= 16) emulator::fail("shared address %u, %u bytes: not aligned", address, bytes);
    return memory + (address - emulator::kStart);
}

inline uint4 ld_global_v4_if(bool valid, const void* global) {
    return valid ? *static_cast<const uint4*>(global) : uint4{};
}

template <class T>
inline T load_shared(uint32_t smem) {
    T v;
    memcpy(&v, smem_pointer(smem, sizeof(T)), sizeof(T));
    return v;
}
inline uint4 ld_shared_v4(uint32_t smem) { return load_shared<uint4>(smem); }
inline uint2 ld_shared_v2(uint32_t smem) { return load_shared<uint2>(smem); }
inline uint32_t ld_shared(uint32_t smem) { return load_shared<uint32_t>(smem); }

template <class T>
inline void store_shared(uint32_t smem, T v) {
    memcpy(smem_pointer(smem, sizeof(T)), &v, sizeof(T));
}
inline void st_shared_v4(uint32_t smem, uint4 v) { store_shared(smem, v); }
inline void st_shared(uint32_t smem, uint32_t v) { store_shared(smem, v); }
inline void fence_proxy_async() {}

inline uint32_t ld_shared_u16(uint32_t smem) { return load_shared<uint16_t>(smem); }

}  // namespace polymoe
