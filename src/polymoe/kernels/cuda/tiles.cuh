// Rows of x in tiles, and the ring of stages through which weights and x come to the warps that multiply.
#pragma once
#include "gemm.cuh"

namespace polymoe {

constexpr int kMostStages = 16;

// The item's rows as its tiles have room for.
__device__ __forceinline__ int padded_rows(int rows) { return (rows + 7) / 8 * 8; }

// Where column `column` of row `row` of an item of `rows` rows stands, in elements from the item's first.
__device__ __forceinline__ int tile_place(int row, int column, int rows) {
    const int chunk = (column / 8 % 8) ^ (row % 8);
    return column / 64 * padded_rows(rows) * 64 + row * 64 + chunk * 8 + column % 8;
}

struct Ring {
    uint32_t full, empty, data;
    int stages, stage_bytes;
    int slot;
    uint32_t parity;

    // The slot's data, once they are there.
    __device__ __forceinline__ uint32_t wait() const {
        barrier_wait(full + 8 * slot, parity);
        return data + slot * stage_bytes;
    }

    __device__ __forceinline__ void next() {
        if (++slot == stages) slot = 0, parity ^= 1;
    }
};

// A ring at its start; stages begin at a multiple of 1024 bytes. `barriers`: [2 * kMostStages].
__device__ __forceinline__ Ring ring_at(const GemmArgs& args, const uint8_t* memory, const uint64_t* barriers, int stage_bytes) {
    Ring ring;
    ring.full = shared_address(barriers), ring.empty = ring.full + 8 * kMostStages;
    ring.data = (shared_address(memory) + 1023) / 1024 * 1024;
    ring.stages = args.stages, ring.stage_bytes = stage_bytes;
    ring.slot = 0;
    return ring;
}

// Its barriers: so many arrive where a stage is filled, and where it is given back.
__device__ __forceinline__ void init_barriers(const GemmArgs& args, const Ring& ring, int filled, int given_back) {
    for (int i = 0; i < args.stages; ++i) {
        barrier_init(ring.full + 8 * i, filled);
        barrier_init(ring.empty + 8 * i, given_back);
    }
}

}  // namespace polymoe
