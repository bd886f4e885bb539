// Ahead of the first GEMM: which expanded rows go to which expert, and x in permuted tiles.
#include "entry.cuh"
#include "expert_ids.cuh"
#include "gemm/args.cuh"
#include "permuted_row.cuh"
#include "ptx/griddepcontrol.cuh"

namespace polymoe {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct PermutationArgs {
    const void* ids;            // [rows]
    int* permuted_to_expanded;  // [rows]
    WorkTile* work_tiles;
    WorkTile* narrow_tiles;             // those of at most narrow_m rows
    TileList* lists;                    // of the two launches for work_tiles, and of the two for narrow_tiles
    PermutedRow* expanded_to_permuted;  // [rows], or null
    int* counts;  // [CTAs, experts]: rows of each expert among those of a CTA (permutation_many_ctas)
    int rows, first_expert, experts, block_m;
    int narrow_m;  // 0: all work tiles are in work_tiles
    int ctas;      // of a launch
    int long_ids;
    int even;  // whether work tiles of an expert have about as many rows each; narrow_m is 0 then
};

__device__ __forceinline__ PermutedRow make_permuted_row(int permuted_row, int tile_row, int row, int rows) {
    return {permuted_row, tile_row, row, padded_rows(rows)};
}

// Inclusive prefix sum over a warp.
__device__ __forceinline__ int prefix_sum(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// An expert's work tiles of up to block_m rows, and rows of its narrow one: 0 or up to narrow_m. Or their sums.
struct Tiles {
    int wide, narrow_rows;
    int narrow;
};

// Most rows of the work tiles of an expert with so many: block_m, or what as many even tiles have, a multiple of 16.
__device__ __forceinline__ int tile_rows(const PermutationArgs& args, int rows) {
    if (!args.even || rows <= args.block_m) return args.block_m;
    const int tiles = (rows + args.block_m - 1) / args.block_m;
    return ((rows + tiles - 1) / tiles + 15) / 16 * 16;
}

__device__ __forceinline__ Tiles tiles_of(const PermutationArgs& args, int rows) {
    const int of_tile = tile_rows(args, rows), whole = rows / of_tile, left = rows - whole * of_tile;
    return left > args.narrow_m ? Tiles{whole + 1, 0, 0} : Tiles{whole, left, left > 0};
}

// `ends`: the tiles of this expert and those before it.
__device__ __forceinline__ void write_work_tiles(const PermutationArgs& args, int expert, int rows, int first,
                                                 int first_padded, Tiles tiles, Tiles ends) {
    const int wide_rows = rows - tiles.narrow_rows, of_tile = tile_rows(args, rows);
    WorkTile* to = args.work_tiles + (ends.wide - tiles.wide);
    for (int done = 0; done < wide_rows; done += of_tile) {
        *to++ = {expert, first + done, min(of_tile, wide_rows - done), first_padded + done};
    }
    if (tiles.narrow) {
        args.narrow_tiles[ends.narrow - 1] = {expert, first + wide_rows, tiles.narrow_rows, first_padded + wide_rows};
    }
}

// Work tiles with many rows keep the tensor cores busy, those with few rows memory. So both run side by side: the
// first launch leaves SMs to the second. It must not be the last to end, so it gets more than its share of the work.
// Times are relative to a narrow tile's: a wide one takes as long as 0.9 of those, and 0.012 for each row.
__device__ __forceinline__ void write_lists(const PermutationArgs& args, int rows, Tiles ends) {
    constexpr float kSlack = 1.8f;
    const float wide = 0.9f * ends.wide + 0.012f * (rows - ends.narrow_rows), share = wide / (wide + ends.narrow);
    const int ctas = ends.wide ? min(args.ctas, 1 + static_cast<int>(kSlack * share * args.ctas)) : 0;
    args.lists[0] = args.lists[1] = {ends.wide, ctas, ctas, 0};
    args.lists[2] = args.lists[3] = {ends.narrow, args.ctas, args.ctas, 0};
}

// Up to 32 expanded rows: one warp, a row a lane.
__device__ __forceinline__ void permutation_one_warp(const PermutationArgs& args) {
    const int lane = threadIdx.x;
    grid_dependency_wait();
    launch_dependents();
    const int expert = local_expert(args, lane);
    const uint32_t peers = __match_any_sync(0xFFFFFFFFu, expert), below = (1u << lane) - 1;
    const bool first_of_expert = expert >= 0 && (peers & below) == 0;
    const int rows = first_of_expert ? __popc(peers) : 0;
    const Tiles tiles = tiles_of(args, rows);
    const Tiles ends = {prefix_sum(tiles.wide, lane), prefix_sum(tiles.narrow_rows, lane),
                        prefix_sum(tiles.narrow, lane)};
    const int row_end = prefix_sum(rows, lane), first = row_end - rows;
    const int first_padded = prefix_sum(padded_rows(rows), lane) - padded_rows(rows);
    const int mine = __shfl_sync(0xFFFFFFFFu, first, __ffs(peers) - 1) + __popc(peers & below);
    if (expert >= 0) args.permuted_to_expanded[mine] = lane;
    if (args.expanded_to_permuted) {
        const int leader = __ffs(peers) - 1, count = __popc(peers), row = __popc(peers & below);
        const int done = row / args.block_m * args.block_m;
        const int tile_row = __shfl_sync(0xFFFFFFFFu, first_padded, leader) + done;
        const int permuted_row = expert >= 0 ? mine : -1;
        if (lane < args.rows) {
            args.expanded_to_permuted[lane] =
                make_permuted_row(permuted_row, tile_row, row - done, min(args.block_m, count - done));
        }
    }
    write_work_tiles(args, expert, rows, first, first_padded, tiles, ends);
    if (lane == 31) write_lists(args, row_end, ends);
}

// Calls work(row, expert or -1) for the expanded rows from `first` to `end`, by the threads of a CTA.
template <class Work>
__device__ __forceinline__ void each_row(const PermutationArgs& args, int first, int end, Work work) {
    constexpr int kAtOnce = 4;
    for (int start = first + threadIdx.x; start < end; start += kAtOnce * kThreads) {
        int experts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = start + i * kThreads;
            experts[i] = row < end ? local_expert(args, row) : -1;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (start + i * kThreads < end) work(start + i * kThreads, experts[i]);
        }
    }
}

// What a CTA knows of each expert: the number of its rows; its first permuted row, and its first where rows are padded;
// and the next permuted row that this CTA assigns.
struct Experts {
    int rows[kThreads], first[kThreads], first_padded[kThreads], next[kThreads];
};

// By all threads of a CTA: each has its expert's number of rows, and how many of them come before this CTA's. One of
// the CTAs writes the work tiles.
__device__ __forceinline__ void assign_rows(const PermutationArgs& args, Experts& experts, int rows, int before,
                                            bool writes) {
    constexpr int kSums = 5;
    __shared__ int warp_sums[kSums][kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int padded = padded_rows(rows);
    const Tiles tiles = tiles_of(args, rows);
    int ends[kSums] = {rows, padded, tiles.wide, tiles.narrow_rows, tiles.narrow};
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
        ends[i] = prefix_sum(ends[i], lane);
        if (lane == 31) warp_sums[i][warp] = ends[i];
    }
    __syncthreads();
    if (warp < kSums) warp_sums[warp][lane] = prefix_sum(warp_sums[warp][lane], lane);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSums; ++i) ends[i] += warp ? warp_sums[i][warp - 1] : 0;
    const int row_end = ends[0], padded_end = ends[1];
    if (writes) {
        const Tiles tile_ends = {ends[2], ends[3], ends[4]};
        if (threadIdx.x == kThreads - 1) write_lists(args, row_end, tile_ends);
        write_work_tiles(args, threadIdx.x, rows, row_end - rows, padded_end - padded, tiles, tile_ends);
    }
    experts.rows[threadIdx.x] = rows, experts.first[threadIdx.x] = row_end - rows;
    experts.first_padded[threadIdx.x] = padded_end - padded, experts.next[threadIdx.x] = row_end - rows + before;
    __syncthreads();
}

// Writes both directions of the permutation for the expanded rows from `first` to `end`.
__device__ __forceinline__ void write_permutation(const PermutationArgs& args, int first, int end, Experts& experts) {
    each_row(args, first, end, [&](int row, int expert) {
        if (expert < 0) {
            if (args.expanded_to_permuted) args.expanded_to_permuted[row] = make_permuted_row(-1, 0, 0, 0);
            return;
        }
        const int permuted_row = atomicAdd(&experts.next[expert], 1);
        args.permuted_to_expanded[permuted_row] = row;
        if (args.expanded_to_permuted) {
            const int of_expert = permuted_row - experts.first[expert], of_tile = tile_rows(args, experts.rows[expert]);
            const int done = of_expert / of_tile * of_tile;
            args.expanded_to_permuted[row] =
                make_permuted_row(permuted_row, experts.first_padded[expert] + done, of_expert - done,
                                  min(of_tile, experts.rows[expert] - done));
        }
    });
}

// One CTA; up to 1024 experts. The order of an expert's rows depends on timing. No result does: rows of x are columns
// of an MMA, which do not depend on each other.
__device__ __forceinline__ void permutation_one_cta(const PermutationArgs& args) {
    __shared__ Experts experts;
    experts.next[threadIdx.x] = 0;
    __syncthreads();
    grid_dependency_wait();
    launch_dependents();
    each_row(args, 0, args.rows, [&](int, int expert) {
        if (expert >= 0) atomicAdd(&experts.next[expert], 1);
    });
    __syncthreads();
    const int rows = experts.next[threadIdx.x];
    __syncthreads();
    assign_rows(args, experts, rows, 0, true);
    write_permutation(args, 0, args.rows, experts);
}

// The same by several CTAs in two launches, each CTA with its share of the rows.
__device__ __forceinline__ int share_of_rows(const PermutationArgs& args, int cta) {
    return static_cast<int>(static_cast<long long>(args.rows) * cta / gridDim.x);
}

__device__ __forceinline__ void permutation_count(const PermutationArgs& args) {
    __shared__ int counts[kThreads];
    counts[threadIdx.x] = 0;
    __syncthreads();
    grid_dependency_wait();
    launch_dependents();
    each_row(args, share_of_rows(args, blockIdx.x), share_of_rows(args, blockIdx.x + 1), [&](int, int expert) {
        if (expert >= 0) atomicAdd(&counts[expert], 1);
    });
    __syncthreads();
    if (threadIdx.x < args.experts) args.counts[blockIdx.x * args.experts + threadIdx.x] = counts[threadIdx.x];
}

__device__ __forceinline__ void permutation_many_ctas(const PermutationArgs& args) {
    __shared__ Experts experts;
    grid_dependency_wait();
    launch_dependents();
    int rows = 0, before = 0;
    if (threadIdx.x < args.experts) {
#pragma unroll 8
        for (int cta = 0; cta < gridDim.x; ++cta) {
            const int count = args.counts[cta * args.experts + threadIdx.x];
            if (cta < blockIdx.x) before += count;
            rows += count;
        }
    }
    assign_rows(args, experts, rows, before, blockIdx.x == 0);
    write_permutation(args, share_of_rows(args, blockIdx.x), share_of_rows(args, blockIdx.x + 1), experts);
}

struct PermuteArgs {
    const uint16_t* x;                        // [tokens, columns]
    uint16_t* out;                            // [padded rows, columns padded to a multiple of 64], in tiles
    const PermutedRow* expanded_to_permuted;  // [tokens, top_k]
    int columns, top_k;
};

// x in permuted tiles of bfloat16: for each work tile, for each 64 columns, its rows of 128 bytes, swizzled. Grid:
// tokens. A row is read once, and written for each of the token's experts.
__device__ __forceinline__ void permute_x(const PermuteArgs& args) {
    const int blocks = (args.columns + 63) / 64, lane = threadIdx.x % 32;
    const uint16_t* x = args.x + static_cast<long long>(blockIdx.x) * args.columns;
    grid_dependency_wait();
    launch_dependents();
    for (int first = 0; first < args.top_k; first += 32) {  // a lane looks up an expanded row for all
        PermutedRow place = {-1, 0, 0, 0};
        if (first + lane < args.top_k) {
            place = args.expanded_to_permuted[static_cast<long long>(blockIdx.x) * args.top_k + first + lane];
        }
        const int slots = min(32, args.top_k - first);
        for (int chunk = threadIdx.x; chunk - lane < blocks * 8; chunk += blockDim.x) {  // whole warps
            uint4 v = make_uint4(0, 0, 0, 0);
            if (chunk * 8 < args.columns) v = *reinterpret_cast<const uint4*>(x + chunk * 8);
            for (int slot = 0; slot < slots; ++slot) {
                if (__shfl_sync(0xFFFFFFFFu, place.permuted_row, slot) < 0) continue;
                const int tile_row = __shfl_sync(0xFFFFFFFFu, place.tile_row, slot);
                const int row = __shfl_sync(0xFFFFFFFFu, place.row, slot);
                const int padded = __shfl_sync(0xFFFFFFFFu, place.padded_rows, slot);
                uint16_t* out = args.out + static_cast<long long>(tile_row) * blocks * 64;
                if (chunk < blocks * 8) {
                    out += chunk / 8 * padded * 64 + row * 64 + ((chunk % 8) ^ (row % 8)) * 8;
                    *reinterpret_cast<uint4*>(out) = v;
                }
            }
        }
    }
}

}  // namespace polymoe

POLYMOE_KERNEL(permutation_one_cta, PermutationArgs, (1024, 1), polymoe::permutation_one_cta)
POLYMOE_KERNEL(permutation_count, PermutationArgs, (1024, 1), polymoe::permutation_count)
POLYMOE_KERNEL(permutation_many_ctas, PermutationArgs, (1024, 1), polymoe::permutation_many_ctas)
POLYMOE_KERNEL(permutation_one_warp, PermutationArgs, (32, 1), polymoe::permutation_one_warp)
POLYMOE_KERNEL(permute_x, PermuteArgs, (256), polymoe::permute_x)
