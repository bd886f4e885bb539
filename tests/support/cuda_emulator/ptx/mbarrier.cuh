// Stands in for the kernels' ptx/mbarrier.cuh.
#pragma once
#include "memory.cuh"

namespace polymoe {

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    const int count = static_cast<int>(arrivals);
    here.barriers.push_back({barrier, count, count, 0, 0});
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    auto& b = emulator::barrier_at(barrier);
    b.bytes += bytes;
    if (--b.pending < 0) emulator::fail("more arrivals than a barrier expects");
    emulator::check_barrier(b);
    here.moved = true;
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    emulator::wait_until([=] { return (emulator::barrier_at(barrier).phase & 1) != parity; });
}
inline void named_barrier_sync(int name, int threads) {
    emulator::meet(here.named[name], here.now->number, threads, nullptr, [](void**) {});
}

}  // namespace polymoe
