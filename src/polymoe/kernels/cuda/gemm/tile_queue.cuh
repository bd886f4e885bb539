// Which tiles a CTA computes: it begins with its own number, and then takes the next one that no CTA has.
//
// The first producer takes them. It leaves a tile beside the first stage of the tile, for the other producers and, once
// the stage is full, for the consumers.
#pragma once
#include "../pipeline.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "tile_list.cuh"

namespace polymoe {

constexpr int kNoTile = -1;

// The value, by a warp's first lane while the others have nothing to do: the compiler may keep it in a uniform
// register.
__device__ __forceinline__ int of_first_lane(int value) { return __shfl_sync(1u, value, 0); }

// What a CTA computes at a time.
struct QueuedTile {
    WorkTile rows;  // of x
    int n_block;    // the first block of 64 rows of weights; or kNoTile: none is left
};

// Loops over tiles count up to the number of all tiles and never break: where lanes might leave a loop at different
// times, the compiler keeps what changes in it in registers of each lane.
struct TileQueue {
    uint64_t announced[kMaxStages];  // mbarriers: the first producer has come to the stage
    WorkTile rows[kMaxStages];
    int n_blocks[kMaxStages];

    __device__ __forceinline__ void init(int stages) {
        for (int i = 0; i < stages; ++i) mbarrier_init(smem_address(&announced[i]), 1);
    }

    // The first producer, at an empty stage where a tile begins.
    __device__ __forceinline__ void put(const Pipeline& pipeline, QueuedTile tile) {
        rows[pipeline.stage] = tile.rows, n_blocks[pipeline.stage] = tile.n_block;
    }

    // The first producer, at every empty stage.
    __device__ __forceinline__ void announce(const Pipeline& pipeline) {
        mbarrier_arrive(smem_address(announced) + 8 * pipeline.stage);
    }

    // Another producer, where a tile begins.
    __device__ __forceinline__ QueuedTile wait(const Pipeline& pipeline) {
        mbarrier_wait(smem_address(announced) + 8 * pipeline.stage, pipeline.parity ^ 1);
        return {rows[pipeline.stage], n_blocks[pipeline.stage]};
    }

    // A warp of consumers, where a tile begins or none is left. The lane that gives the stage back reads for all.
    __device__ __forceinline__ QueuedTile of_stage(const Pipeline& pipeline) {
        pipeline.wait_full();
        QueuedTile tile = {};
        if (threadIdx.x % 32 == 0) tile = {rows[pipeline.stage], n_blocks[pipeline.stage]};
        return {uniform_tile(tile.rows), warp_uniform(tile.n_block)};
    }
};

// Whether this launch is the second of two for the same matrices, that of the narrow work tiles. x_buffers, of which
// these kernels have none, is 2 then.
__device__ __forceinline__ bool second_launch(const GemmArgs& args) { return args.x_buffers == 2; }

// How a launch begins. What it reads beside x was finished before the kernel that writes x let the first one start.
struct LaunchOrder {
    int work_tiles;  // of this launch
    bool waits;      // for the kernel ahead: x is its

    // A second launch begins beside the first, which let it start when x was there. Where the first has no work, it
    // lets the second one start at once and copy weights, and that waits for x instead.
    __device__ __forceinline__ explicit LaunchOrder(const GemmArgs& args) {
        const TileList* list = tile_list(args);
        work_tiles = warp_uniform(list->work_tiles);
        waits = !second_launch(args) || warp_uniform((list - kLists)->work_tiles) == 0;
    }

    // By all threads. Down leaves the rest to its producers.
    template <int PART>
    __device__ __forceinline__ void begin() const {
        if (work_tiles == 0 || !waits) {
            launch_dependents();
        } else if (PART != kDown) {
            grid_dependency_wait();
            launch_dependents();
        }
    }

    // Whether producers have to wait for x, and then let the next kernel start.
    template <int PART>
    __device__ __forceinline__ bool waited() const {
        return work_tiles != 0 && (PART != kDown || !waits);
    }
};

}  // namespace polymoe
