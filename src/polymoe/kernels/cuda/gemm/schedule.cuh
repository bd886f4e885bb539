// Which tiles a CTA computes, and how launches follow each other.
//
// With a queue, a CTA begins with its own number, and then takes the next tile that no CTA has. The first producer
// takes them. It leaves a tile beside the first stage of the tile, for the other producers and, once the stage is full,
// for the consumers. Without, CTAs have every so many tiles: for few of them, or where each takes as long.
#pragma once
#include "../pipeline.cuh"
#include "../ptx/griddepcontrol.cuh"

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

// Calls compute(tile) for the tiles that next() returns, of which there are `total` in all, until one is none.
//
// The loop counts up to their number and never breaks: where lanes might leave a loop at different times, the compiler
// keeps what changes in it in registers of each lane.
template <class Next, class Compute>
__device__ __forceinline__ void for_each_tile(int total, Next next, Compute compute) {
    for (int n = 0; n <= total; ++n) {
        const QueuedTile tile = next();
        if (tile.n_block == kNoTile) n = total;
        if (tile.n_block != kNoTile) compute(tile);
    }
}

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
        announce(pipeline);
    }

    // The first producer, at every other empty stage.
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

    // Consumers: calls compute(tile) for all tiles.
    template <class Compute>
    __device__ __forceinline__ void consume(const Pipeline& pipeline, int total, Compute compute) {
        for_each_tile(total, [&] { return of_stage(pipeline); }, compute);
    }
};

// The thread that takes tiles from the list, the next one ahead of its use. Work tiles have `n_tiles` tiles of N_BLOCKS
// blocks each.
template <int N_BLOCKS>
struct TileTaker {
    const GemmArgs& args;
    int total, n_tiles, next;
    WorkTile rows;

    __device__ __forceinline__ TileTaker(const GemmArgs& args, int total, int n_tiles, int first)
        : args(args), total(total), n_tiles(n_tiles), next(first), rows{} {
        look_up();
    }

    __device__ __forceinline__ int n_block() const { return next % n_tiles * N_BLOCKS; }

    // Where a tile ends.
    __device__ __forceinline__ void look_up() {
        if (next < total) rows = args.work_tiles[next / n_tiles];
    }
};

// The same thread, where a tile begins.
template <class Taker>
__device__ __forceinline__ QueuedTile take_tile(Taker& taker, TileQueue& queue, const Pipeline& pipeline) {
    pipeline.wait_empty();
    const QueuedTile tile = {taker.rows, taker.next < taker.total ? taker.n_block() : kNoTile};
    queue.put(pipeline, tile);
    if (taker.next < taker.total) taker.next = atomicAdd(&taker.args.tiles->next, 1);
    return tile;
}

// ---- launches, each of which may start before the one ahead of it has ended

// By all threads. What `down` reads beside x, which is h, was complete before the kernel ahead of it let it start.
template <int PART>
__device__ __forceinline__ void begin_launch() {
    if (PART == kDown) return;
    grid_dependency_wait();
    launch_dependents();
}

// By those that read x.
template <int PART>
__device__ __forceinline__ void begin_x() {
    if (PART != kDown) return;
    grid_dependency_wait();
    launch_dependents();
}

// The same by a producer that first has other copies to start.
struct WaitForX {
    bool waited;

    __device__ __forceinline__ void operator()() {
        if (waited) return;
        grid_dependency_wait();
        launch_dependents();
        waited = true;
    }

    // The next kernel relies on this one having waited for the kernel ahead of it.
    __device__ __forceinline__ void end() const {
        if (!waited) grid_dependency_wait();
    }
};

// How a launch begins. What it reads beside x was finished before the kernel that writes x let the first one start.
struct LaunchOrder {
    int work_tiles;  // of this launch
    bool waits;      // for the kernel ahead: x is its

    // A second launch begins beside the first, which let it start when x was there. Where the first has no work, it
    // lets the second one start at once and copy weights, and that waits for x instead.
    __device__ __forceinline__ explicit LaunchOrder(const GemmArgs& args) {
        work_tiles = warp_uniform(args.tiles->work_tiles);
        waits = !args.second_launch || warp_uniform((args.tiles - kLists)->work_tiles) == 0;
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
