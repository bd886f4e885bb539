// GEMMs for few rows: those that sort up to 32 expanded rows by themselves need no launch for that ahead of them.
#pragma once
#include "../expert_ids.cuh"
#include "args.cuh"

namespace polymoe {

struct FewRowsArgs : GemmArgs {
    const void* ids;  // [rows]: expert ids, from which work tiles follow; or null: work tiles are given
    int rows, first_expert, experts, long_ids;
};

// Up to 32 expanded rows in the order of their experts' first rows, and their work tiles. In shared memory.
struct SortedRows {
    WorkTile work_tiles[32];
    int permuted_to_expanded[32];
    int num_tiles;

    // By one warp, a row a lane. Every CTA of both GEMMs finds the same.
    __device__ __forceinline__ void sort(const FewRowsArgs& args) {
        constexpr uint32_t kAll = 0xFFFFFFFFu;
        const int lane = threadIdx.x % 32, expert = local_expert(args, lane);
        const uint32_t peers = __match_any_sync(kAll, expert), below = (1u << lane) - 1;
        const int leader = __ffs(peers) - 1, count = __popc(peers), inner = __popc(peers & below);
        // The rows of the experts up to this lane's, where it is its expert's first; and their work tiles.
        int rows = expert >= 0 && inner == 0 ? count : 0;
        int tiles = (rows + args.block_m - 1) / args.block_m;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int more_rows = __shfl_up_sync(kAll, rows, step), more_tiles = __shfl_up_sync(kAll, tiles, step);
            if (lane >= step) rows += more_rows, tiles += more_tiles;
        }
        if (lane == 31) num_tiles = tiles;
        const int row_end = __shfl_sync(kAll, rows, leader), tile_end = __shfl_sync(kAll, tiles, leader);
        if (expert < 0) return;
        const int row = row_end - count + inner;
        permuted_to_expanded[row] = lane;
        if (inner % args.block_m == 0) {
            const int left = count - inner;
            work_tiles[tile_end - (left + args.block_m - 1) / args.block_m] = {expert, row, min(args.block_m, left), 0};
        }
    }
};

}  // namespace polymoe
