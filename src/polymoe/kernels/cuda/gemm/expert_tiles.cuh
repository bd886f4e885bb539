// Another order of tiles, for work tiles of the same expert.
#pragma once
#include "schedule.cuh"

namespace polymoe {

// As TileTaker, but of each kAtOnce work tiles, those of an expert have the same rows of weights one after the other.
// At about the same time then, so that the L2 cache has what the first of them reads.
template <int N_BLOCKS>
struct ExpertTiles {
    static constexpr int kAtOnce = 8;
    const GemmArgs& args;
    int total, n_tiles, next, n_tile;
    WorkTile rows;

    __device__ __forceinline__ ExpertTiles(const GemmArgs& args, int total, int n_tiles, int first)
        : args(args), total(total), n_tiles(n_tiles), next(first), n_tile(0), rows{} {
        look_up();
    }

    __device__ __forceinline__ int n_block() const { return n_tile * N_BLOCKS; }

    __device__ __forceinline__ void look_up() {
        if (next >= total) return;
        const int group = next / (kAtOnce * n_tiles) * kAtOnce, count = min(kAtOnce, total / n_tiles - group);
        int experts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) experts[i] = args.work_tiles[group + min(i, count - 1)].expert;
        // Of the work tiles up to the one that next / n_tiles counts: the first of its expert, and of the next expert.
        const int index = next / n_tiles - group;
        int begin = 0, end = count;
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) {
            if (i < count && experts[i] != experts[i - 1]) {
                if (i <= index) begin = i;
                if (i > index) end = min(end, i);
            }
        }
        const int inner = next - (group + begin) * n_tiles, of_expert = end - begin;
        n_tile = inner / of_expert;
        rows = args.work_tiles[group + begin + inner % of_expert];
    }
};

}  // namespace polymoe
