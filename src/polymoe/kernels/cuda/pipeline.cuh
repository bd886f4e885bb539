// The pipeline of stages in shared memory through which weights and x reach the consumers, and what producers and
// consumers agree on.
#pragma once
#include "gemm/args.cuh"
#include "permuted_row.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sizes.cuh"

namespace polymoe {

// Registers of a consumer thread and of a producer thread, by consumer warpgroups. The CTA starts with what these add
// up to: setmaxnreg would wait for ever for more.
__host__ __device__ constexpr int consumer_regs(int warpgroups) {
    return warpgroups == 2 ? 232 : warpgroups == 3 ? 152 : 112;
}

__host__ __device__ constexpr int producer_regs(int warpgroups) {
    return warpgroups == 4 ? 32 : warpgroups == 3 ? 56 : 40;
}

// Where an element of a work tile of `rows` rows stands in permuted tiles of bfloat16, in elements from the work tile's
// first: tiles of 64 columns, 128 bytes per row, swizzled by 128 bytes.
__device__ __forceinline__ int permuted_tile_offset(int row, int column, int rows) {
    const int chunk = (column / 8 % 8) ^ (row % 8);
    return column / 64 * padded_rows(rows) * 64 + row * 64 + chunk * 8 + column % 8;
}

struct Pipeline {
    uint32_t full, empty, data;  // mbarriers of the stages, and the first stage
    int stages, stage_bytes;
    int stage;
    uint32_t parity;

    __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
    __device__ __forceinline__ uint32_t empty_barrier() const { return empty + 8 * stage; }

    // The current stage's address, without waiting.
    __device__ __forceinline__ uint32_t address() const { return data + stage * stage_bytes; }

    // Consumers: the current stage's address, once it is full.
    __device__ __forceinline__ uint32_t wait_full() const {
        mbarrier_wait(full_barrier(), parity);
        return address();
    }

    // Producers: until the current stage is empty.
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty_barrier(), parity); }

    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// Where stages begin in dynamic shared memory: at a multiple of 1024 bytes.
__device__ __forceinline__ uint32_t align_stages(const uint8_t* memory) {
    return (smem_address(memory) + 1023) / 1024 * 1024;
}

// A pipeline at its start; its caller sets the parity. `barriers` has room for 2 * kMaxStages.
__device__ __forceinline__ Pipeline make_pipeline(const GemmArgs& args, uint32_t data, const uint64_t* barriers,
                                                  int stage_bytes) {
    Pipeline pipeline;
    pipeline.full = smem_address(barriers), pipeline.empty = pipeline.full + 8 * kMaxStages;
    pipeline.data = data;
    pipeline.stages = args.stages, pipeline.stage_bytes = stage_bytes;
    pipeline.stage = 0;
    return pipeline;
}

// By one thread: all mbarriers, those of `others` too. `producers` and `consumers` arrive at a stage's.
template <class... Others>
__device__ __forceinline__ void init_barriers(const GemmArgs& args, const Pipeline& pipeline, int producers,
                                              int consumers, Others&... others) {
    for (int i = 0; i < args.stages; ++i) {
        mbarrier_init(pipeline.full + 8 * i, producers);
        mbarrier_init(pipeline.empty + 8 * i, consumers);
    }
    (others.init(args.stages), ...);
    mbarrier_init_fence();
}

// Ping-pong: two warpgroups alternate at the tensor cores. On their own they come to decode, and to multiply, at the
// same time. (Of four warpgroups, some always do the other.)
struct PingPong {
    uint32_t mine, next;  // mbarriers
    uint32_t parity;

    __device__ __forceinline__ void wait() {
        mbarrier_wait(mine, parity);
        parity ^= 1;
    }

    __device__ __forceinline__ void pass() const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(next);
    }
};

// The barriers of PingPong, in shared memory.
template <int WARPGROUPS>
struct Turns {
    uint64_t barriers[WARPGROUPS];

    __device__ __forceinline__ void init(int) {
        for (int i = 0; i < WARPGROUPS; ++i) mbarrier_init(smem_address(&barriers[i]), 4);
    }

    __device__ __forceinline__ PingPong of(int warpgroup, int next) const {
        return {smem_address(&barriers[warpgroup]), smem_address(&barriers[next]), warpgroup == 0};
    }
};

// A stage of weights of whole bytes: weights, then x, then scales.
template <int WEIGHT_BYTES, int X_BYTES, int SCALE_BYTES = 0>
struct Stage {
    static constexpr int kX = WEIGHT_BYTES, kScales = kX + X_BYTES;
    static constexpr int kBytes = (kScales + SCALE_BYTES + 1023) / 1024 * 1024;
};

// Weights for few rows are read by one work tile: they need not stay in the L2 cache.
template <int BLOCK_M>
__device__ __forceinline__ void copy_weights(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    if (BLOCK_M <= 32) {
        bulk_copy_g2s_evict_first(smem, global, bytes, barrier);
    } else {
        bulk_copy_g2s(smem, global, bytes, barrier);
    }
}

}  // namespace polymoe
