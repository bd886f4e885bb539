// What the permutation tells a launch of a grouped GEMM.
#pragma once
#include "args.cuh"

namespace polymoe {

// The work of one launch.
struct __align__(16) TileList {
    int work_tiles;  // in use
    int ctas;        // CTAs that take part: those of smaller numbers
    int next;        // the tile that nobody has taken yet
    int unused;
};

// A layer has one for each launch: gate and up, down; the same for narrow work tiles.
constexpr int kLists = 2;

// GemmArgs::num_tiles points to it.
__device__ __forceinline__ TileList* tile_list(const GemmArgs& args) {
    return reinterpret_cast<TileList*>(const_cast<int*>(args.num_tiles));
}

}  // namespace polymoe
