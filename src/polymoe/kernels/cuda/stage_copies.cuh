// How a producer warp copies to a stage of shared memory, and how the copies arrive at the barrier that consumers wait
// for.
//
// From SM90 on the bulk copy engine copies: one lane starts a copy, and the barrier counts its bytes. SM80 has no such
// engine: each lane copies 16 bytes at a time, and arrives at the barrier when all of its own have landed.
#pragma once
#include "ptx/async_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "sizes.cuh"

namespace polymoe {

#ifdef POLYMOE_SM80

constexpr int kCopyLanes = 32;  // lanes of a producer warp that copy, each of which arrives at the barrier

// One warp cannot start as many copies as memory can serve: kCopyWarps share the weights.
__device__ __forceinline__ bool copies_weights(int warp) {
    return warp >= kMmaConsumerWarps && warp < kMmaConsumerWarps + kCopyWarps;
}

// Before the copies, by each lane that waited for the stage to be empty.
__device__ __forceinline__ void expect_copies(uint32_t barrier, uint32_t bytes) {}

// By `threads` threads, of which this one is number `thread`. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void copy_by_threads(uint32_t smem, const void* global, uint32_t bytes, int thread,
                                                int threads) {
    const auto* from = static_cast<const uint8_t*>(global);
#pragma unroll 4
    for (uint32_t i = thread * 16; i < bytes; i += threads * 16) cp_async_16(smem + i, from + i);
}

// By all lanes of the warps that copy weights.
__device__ __forceinline__ void copy_to_stage(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    copy_by_threads(smem, global, bytes, threadIdx.x - kMmaConsumerWarps * 32, kCopyWarps * 32);
}

// By all lanes: `rows` rows of `bytes` each, at most 32. Lane r knows where row r is and where it goes: `stride` bytes
// behind the row before it.
__device__ __forceinline__ void copy_rows(uint32_t smem, const uint16_t* row, uint32_t bytes, uint32_t barrier,
                                          int lane, int rows, int stride) {
    for (int r = 0; r < rows; ++r) {
        const auto address = __shfl_sync(0xFFFFFFFFu, reinterpret_cast<unsigned long long>(row), r);
        copy_by_threads(smem + (r - lane) * stride, reinterpret_cast<const void*>(address), bytes, lane, 32);
    }
}

// After the copies, by all lanes.
__device__ __forceinline__ void arrive_with_copies(uint32_t barrier) { cp_async_mbarrier_arrive(barrier); }

#else

constexpr int kCopyLanes = 1, kCopyWarps = 1;

__device__ __forceinline__ bool copies_weights(int warp) { return warp == kMmaConsumerWarps; }

__device__ __forceinline__ void expect_copies(uint32_t barrier, uint32_t bytes) {
    mbarrier_arrive_expect_tx(barrier, bytes);
}

__device__ __forceinline__ void copy_to_stage(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    bulk_copy_g2s_evict_first(smem, global, bytes, barrier);
}

// By lanes that have a row: lane r copies row r.
__device__ __forceinline__ void copy_rows(uint32_t smem, const uint16_t* row, uint32_t bytes, uint32_t barrier,
                                          int lane, int rows, int stride) {
    bulk_copy_g2s(smem, row, bytes, barrier);
}

__device__ __forceinline__ void arrive_with_copies(uint32_t barrier) {}

#endif

}  // namespace polymoe
