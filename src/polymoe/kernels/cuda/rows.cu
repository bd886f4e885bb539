// What stands before the first product and after the last: which rows go to which expert, and the weighted sum.
#include "ptx.cuh"

namespace polymoe {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct DispatchArgs {
    const void* ids;  // [rows]
    int* order;       // [rows]: routed rows in expert order; those of no local expert are left out
    int4* items;      // expert, first row, rows, first row where each item's rows are filled up to 8
    int* count;       // items in use
    int4* places;     // [rows]: see Place; or null
    int* counts;      // [blocks, experts]: rows of each expert among those that a thread block looks at (dispatch_many)
    int rows, first_expert, experts, block;  // block: most rows of an item
    int long_ids;
};

// Where a routed row is: its number in expert order, or -1 where no local expert has it; the first of its item's rows where
// each item's rows are filled up to 8, its number among them, and how many they are.
__device__ __forceinline__ int4 make_place(int place, int first_padded, int row, int rows) {
    return make_int4(place, first_padded, row, (rows + 7) / 8 * 8);
}

// Which of the local experts a routed row chose, or -1.
__device__ __forceinline__ int local_expert(const DispatchArgs& args, int row) {
    if (row >= args.rows) return -1;
    const long long id = (args.long_ids ? static_cast<const long long*>(args.ids)[row]
                                        : static_cast<const int*>(args.ids)[row]) - args.first_expert;
    return id >= 0 && id < args.experts ? static_cast<int>(id) : -1;
}

// The sum of a warp's values up to its own lane.
__device__ __forceinline__ int sum_up_to(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

__device__ __forceinline__ void write_items(
    const DispatchArgs& args, int expert, int rows, int first, int first_padded, int first_item) {
    for (int done = 0; done < rows; done += args.block) {
        args.items[first_item++] =
            make_int4(expert, first + done, min(args.block, rows - done), first_padded + done);
    }
}

// Up to 32 rows: one warp, a row a lane.
__device__ __forceinline__ void dispatch_few(const DispatchArgs& args) {
    const int lane = threadIdx.x;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int expert = local_expert(args, lane);
    const uint32_t peers = __match_any_sync(0xFFFFFFFFu, expert), below = (1u << lane) - 1;
    const bool first_of_expert = expert >= 0 && (peers & below) == 0;
    const int rows = first_of_expert ? __popc(peers) : 0, items = (rows + args.block - 1) / args.block;
    const int first = sum_up_to(rows, lane) - rows, item_end = sum_up_to(items, lane);
    const int first_padded = sum_up_to((rows + 7) / 8 * 8, lane) - (rows + 7) / 8 * 8;
    const int mine = __shfl_sync(0xFFFFFFFFu, first, __ffs(peers) - 1) + __popc(peers & below);
    if (expert >= 0) args.order[mine] = lane;
    if (args.places) {
        const int leader = __ffs(peers) - 1, count = __popc(peers), row = __popc(peers & below);
        const int done = row / args.block * args.block;
        const int padded = __shfl_sync(0xFFFFFFFFu, first_padded, leader) + done;
        const int place = expert >= 0 ? mine : -1;
        if (lane < args.rows) {
            args.places[lane] = make_place(place, padded, row - done, min(args.block, count - done));
        }
    }
    write_items(args, expert, rows, first, first_padded, item_end - items);
    if (lane == 31) *args.count = item_end;
}

// Calls work(row, expert or -1) for the routed rows from `first` to `end`, by the threads of a block.
template <class Work>
__device__ __forceinline__ void each_row(const DispatchArgs& args, int first, int end, Work work) {
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

// What a block knows of each expert: its rows' number, the first in expert order and where they are filled up to 8; and
// the place of the next row that this block has for it.
struct Experts {
    int rows[kThreads], first[kThreads], first_padded[kThreads], next[kThreads];
};

// Each thread has its expert's number of rows, and how many of them are before this block's. One block of those that come
// here writes the items. All threads of a block.
__device__ __forceinline__ void lay_out(const DispatchArgs& args, Experts& experts, int rows, int before, bool writes) {
    __shared__ int warp_sums[3][kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int padded = (rows + 7) / 8 * 8, items = (rows + args.block - 1) / args.block;
    int row_end = sum_up_to(rows, lane), item_end = sum_up_to(items, lane), padded_end = sum_up_to(padded, lane);
    if (lane == 31) warp_sums[0][warp] = row_end, warp_sums[1][warp] = item_end, warp_sums[2][warp] = padded_end;
    __syncthreads();
    if (warp < 3) warp_sums[warp][lane] = sum_up_to(warp_sums[warp][lane], lane);
    __syncthreads();
    if (warp) {
        row_end += warp_sums[0][warp - 1], item_end += warp_sums[1][warp - 1];
        padded_end += warp_sums[2][warp - 1];
    }
    if (writes) {
        if (threadIdx.x == kThreads - 1) *args.count = item_end;
        write_items(args, threadIdx.x, rows, row_end - rows, padded_end - padded, item_end - items);
    }
    experts.rows[threadIdx.x] = rows, experts.first[threadIdx.x] = row_end - rows;
    experts.first_padded[threadIdx.x] = padded_end - padded, experts.next[threadIdx.x] = row_end - rows + before;
    __syncthreads();
}

// Gives the routed rows from `first` to `end` their places.
__device__ __forceinline__ void place_rows(const DispatchArgs& args, int first, int end, Experts& experts) {
    each_row(args, first, end, [&](int row, int expert) {
        if (expert < 0) {
            if (args.places) args.places[row] = make_place(-1, 0, 0, 0);
            return;
        }
        const int place = atomicAdd(&experts.next[expert], 1);
        args.order[place] = row;
        if (args.places) {
            const int of_expert = place - experts.first[expert], done = of_expert / args.block * args.block;
            args.places[row] = make_place(place, experts.first_padded[expert] + done, of_expert - done,
                                          min(args.block, experts.rows[expert] - done));
        }
    });
}

// One thread block; up to 1024 experts. The order of an expert's rows depends on timing, what becomes of each row does
// not: rows are columns of a product, and columns know nothing of each other.
__device__ __forceinline__ void dispatch(const DispatchArgs& args) {
    __shared__ Experts experts;
    experts.next[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    each_row(args, 0, args.rows, [&](int, int expert) {
        if (expert >= 0) atomicAdd(&experts.next[expert], 1);
    });
    __syncthreads();
    const int rows = experts.next[threadIdx.x];
    __syncthreads();
    lay_out(args, experts, rows, 0, true);
    place_rows(args, 0, args.rows, experts);
}

// The same by several thread blocks in two launches, each block with its share of the rows.
__device__ __forceinline__ int share_of_rows(const DispatchArgs& args, int block) {
    return static_cast<int>(static_cast<long long>(args.rows) * block / gridDim.x);
}

__device__ __forceinline__ void count_many(const DispatchArgs& args) {
    __shared__ int counts[kThreads];
    counts[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    each_row(args, share_of_rows(args, blockIdx.x), share_of_rows(args, blockIdx.x + 1),
             [&](int, int expert) {
                 if (expert >= 0) atomicAdd(&counts[expert], 1);
             });
    __syncthreads();
    if (threadIdx.x < args.experts) args.counts[blockIdx.x * args.experts + threadIdx.x] = counts[threadIdx.x];
}

__device__ __forceinline__ void dispatch_many(const DispatchArgs& args) {
    __shared__ Experts experts;
    wait_for_previous_kernel();
    let_next_kernel_start();
    int rows = 0, before = 0;
    if (threadIdx.x < args.experts) {
#pragma unroll 8
        for (int block = 0; block < gridDim.x; ++block) {
            const int count = args.counts[block * args.experts + threadIdx.x];
            if (block < blockIdx.x) before += count;
            rows += count;
        }
    }
    lay_out(args, experts, rows, before, blockIdx.x == 0);
    place_rows(args, share_of_rows(args, blockIdx.x), share_of_rows(args, blockIdx.x + 1), experts);
}

struct SpreadArgs {
    const uint16_t* x;   // [tokens, columns]
    uint16_t* out;       // [rows of items filled up to 8, columns up to a multiple of 64], in tiles
    const int4* places;  // [tokens, slots]
    int columns, slots;
};

// x's rows where the prefill kernel reads them: for each item, for each 64 columns, its rows of 128 bytes, swizzled.
// Grid: tokens. A row is read once, and written for each of the token's experts.
__device__ __forceinline__ void spread(const SpreadArgs& args) {
    const int blocks = (args.columns + 63) / 64, lane = threadIdx.x % 32;
    const uint16_t* x = args.x + static_cast<long long>(blockIdx.x) * args.columns;
    wait_for_previous_kernel();
    let_next_kernel_start();
    for (int first = 0; first < args.slots; first += 32) {  // a lane looks up a slot for all
        int4 place = make_int4(-1, 0, 0, 0);
        if (first + lane < args.slots) place = args.places[static_cast<long long>(blockIdx.x) * args.slots + first + lane];
        const int slots = min(32, args.slots - first);
        for (int chunk = threadIdx.x; chunk - lane < blocks * 8; chunk += blockDim.x) {  // whole warps
            uint4 v = make_uint4(0, 0, 0, 0);
            if (chunk * 8 < args.columns) v = *reinterpret_cast<const uint4*>(x + chunk * 8);
            for (int slot = 0; slot < slots; ++slot) {
                if (__shfl_sync(0xFFFFFFFFu, place.x, slot) < 0) continue;
                const int item = __shfl_sync(0xFFFFFFFFu, place.y, slot), row = __shfl_sync(0xFFFFFFFFu, place.z, slot);
                const int padded = __shfl_sync(0xFFFFFFFFu, place.w, slot);
                uint16_t* out = args.out + static_cast<long long>(item) * blocks * 64;
                if (chunk < blocks * 8) {
                    out += chunk / 8 * padded * 64 + row * 64 + ((chunk % 8) ^ (row % 8)) * 8;
                    *reinterpret_cast<uint4*>(out) = v;
                }
            }
        }
    }
}

struct CombineArgs {
    const void* y;         // [rows, columns]: float32, or bfloat16 (combine_narrow)
    const int4* places;    // [tokens, slots]: y is in expert order; or null: y is by routed row
    const void* ids;       // [tokens, slots]
    const float* weights;  // [tokens, slots], or null for ones
    void* out;             // [tokens, columns]
    int slots, columns, first_expert, experts;
    int long_ids, out_dtype;  // 0 bfloat16, 1 float16, 2 float32
};

// Sixteen bytes of y times a weight.
__device__ __forceinline__ void add_words(float* sum, uint4 v, float weight, bool narrow) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (narrow) {
            sum[2 * i] += weight * __uint_as_float(words[i] << 16);
            sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xFFFF0000u);
        } else {
            sum[i] += weight * __uint_as_float(words[i]);
        }
    }
}

// Grid: tokens by columns / 1024, 128 threads of 8 columns. The sum runs over slots in order. NARROW: y is bfloat16.
template <bool NARROW>
__device__ __forceinline__ void combine(const CombineArgs& args) {
    constexpr int kAtOnce = 8, kLoads = NARROW ? 1 : 2;  // slots whose loads are under way together
    const int token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 8, lane = threadIdx.x % 32;
    const uint4* from = static_cast<const uint4*>(args.y) + column / 8 * kLoads;
    const long long step = args.columns / 8 * kLoads;
    // Places, ids and weights are older than the kernel before, which waited for its own predecessor before this one could
    // start.
    float sum[8] = {};
    for (int first = 0; first < args.slots; first += 32) {  // a lane looks up a slot for all
        int place = -1;
        float weight = 0.0f;
        if (first + lane < args.slots) {
            const long long routed = static_cast<long long>(token) * args.slots + first + lane;
            weight = args.weights ? args.weights[routed] : 1.0f;
            if (args.places) {
                place = args.places[routed].x;
            } else {
                const long long id = (args.long_ids ? static_cast<const long long*>(args.ids)[routed]
                                                    : static_cast<const int*>(args.ids)[routed]) - args.first_expert;
                if (id >= 0 && id < args.experts) place = static_cast<int>(routed);
            }
        }
        if (first == 0) {
            wait_for_previous_kernel();
            let_next_kernel_start();
        }
        const int slots = min(32, args.slots - first);
        for (int start = 0; start < slots; start += kAtOnce) {
            uint4 y[kAtOnce][kLoads];
            float by[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int at = __shfl_sync(0xFFFFFFFFu, place, start + i);  // beyond the last slot: -1
                const bool there = at >= 0 && column < args.columns;
                by[i] = __shfl_sync(0xFFFFFFFFu, weight, start + i);
                if (!there) by[i] = 0.0f;
#pragma unroll
                for (int l = 0; l < kLoads; ++l) {
                    y[i][l] = load_16_if(there, from + at * step + l);
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int l = 0; l < kLoads; ++l) add_words(sum + 4 * l, y[i][l], by[i], NARROW);
            }
        }
    }
    if (column >= args.columns) return;
    const long long to = static_cast<long long>(token) * args.columns + column;
    if (args.out_dtype == 2) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + to);
        out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        return;
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = args.out_dtype == 0
                       ? pack_bfloat16(sum[2 * i], sum[2 * i + 1])
                       : to_float16(sum[2 * i]) | static_cast<uint32_t>(to_float16(sum[2 * i + 1])) << 16;
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.out) + to) = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace polymoe

extern "C" __global__ void __launch_bounds__(1024, 1) dispatch(const __grid_constant__ polymoe::DispatchArgs args) {
    polymoe::dispatch(args);
}

extern "C" __global__ void __launch_bounds__(1024, 1) count_many(const __grid_constant__ polymoe::DispatchArgs args) {
    polymoe::count_many(args);
}

extern "C" __global__ void __launch_bounds__(1024, 1) dispatch_many(const __grid_constant__ polymoe::DispatchArgs args) {
    polymoe::dispatch_many(args);
}

extern "C" __global__ void __launch_bounds__(32, 1) dispatch_few(const __grid_constant__ polymoe::DispatchArgs args) {
    polymoe::dispatch_few(args);
}

extern "C" __global__ void __launch_bounds__(256) spread(const __grid_constant__ polymoe::SpreadArgs args) {
    polymoe::spread(args);
}

extern "C" __global__ void __launch_bounds__(128, 5) combine(const __grid_constant__ polymoe::CombineArgs args) {
    polymoe::combine<false>(args);
}

// Few registers, so that many blocks are under way; the other has what it takes for all loads of eight slots at once.
extern "C" __global__ void __launch_bounds__(128, 8) combine_narrow(const __grid_constant__ polymoe::CombineArgs args) {
    polymoe::combine<true>(args);
}
