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
    int rows, first_expert, experts, block;  // block: most rows of an item
    int long_ids;
};

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
    write_items(args, expert, rows, first, first_padded, item_end - items);
    if (lane == 31) *args.count = item_end;
}

// One thread block; up to 1024 experts. The order of an expert's rows depends on timing, what becomes of each row does
// not: rows are columns of a product, and columns know nothing of each other.
__device__ __forceinline__ void dispatch(const DispatchArgs& args) {
    __shared__ int counts[kThreads], warp_sums[3][kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    counts[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();

    constexpr int kAtOnce = 4;
    for (int start = threadIdx.x; start < args.rows; start += kAtOnce * kThreads) {
        int ids[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) ids[i] = local_expert(args, start + i * kThreads);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (ids[i] >= 0) atomicAdd(&counts[ids[i]], 1);
        }
    }
    __syncthreads();
    const int rows = counts[threadIdx.x], padded = (rows + 7) / 8 * 8, items = (rows + args.block - 1) / args.block;
    int row_end = sum_up_to(rows, lane), item_end = sum_up_to(items, lane), padded_end = sum_up_to(padded, lane);
    if (lane == 31) warp_sums[0][warp] = row_end, warp_sums[1][warp] = item_end, warp_sums[2][warp] = padded_end;
    __syncthreads();
    if (warp < 3) warp_sums[warp][lane] = sum_up_to(warp_sums[warp][lane], lane);
    __syncthreads();
    if (warp) {
        row_end += warp_sums[0][warp - 1], item_end += warp_sums[1][warp - 1];
        padded_end += warp_sums[2][warp - 1];
    }
    if (threadIdx.x == kThreads - 1) *args.count = item_end;
    counts[threadIdx.x] = row_end - rows;
    write_items(args, threadIdx.x, rows, row_end - rows, padded_end - padded, item_end - items);
    __syncthreads();
    for (int start = threadIdx.x; start < args.rows; start += kAtOnce * kThreads) {
        int ids[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) ids[i] = local_expert(args, start + i * kThreads);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (ids[i] >= 0) args.order[atomicAdd(&counts[ids[i]], 1)] = start + i * kThreads;
        }
    }
}

struct SpreadArgs {
    const uint16_t* x;  // [tokens, columns]
    uint16_t* out;      // [rows of items filled up to 8, columns up to a multiple of 64], in tiles
    const int* count;
    const int4* items;
    const int* order;
    int columns, slots;
};

// x's rows where the prefill kernel reads them: for each item, for each 64 columns, its rows of 128 bytes, swizzled.
// Grid: rows and items in turns.
__device__ __forceinline__ void spread(const SpreadArgs& args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int blocks = (args.columns + 63) / 64, count = *args.count;
    for (int index = blockIdx.y; index < count; index += gridDim.y) {
        const int4 item = args.items[index];
        uint16_t* out = args.out + static_cast<long long>(item.w) * blocks * 64;
        const int padded = (item.z + 7) / 8 * 8;
        for (int row = blockIdx.x; row < item.z; row += gridDim.x) {
            const uint16_t* x = args.x + static_cast<long long>(args.order[item.y + row] / args.slots) * args.columns;
#pragma unroll 4
            for (int chunk = threadIdx.x; chunk < blocks * 8; chunk += blockDim.x) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (chunk * 8 < args.columns) v = *reinterpret_cast<const uint4*>(x + chunk * 8);
                const int place = chunk / 8 * padded * 64 + row * 64 + ((chunk % 8) ^ (row % 8)) * 8;
                *reinterpret_cast<uint4*>(out + place) = v;
            }
        }
    }
}

struct CombineArgs {
    const void* y;         // [rows, columns] by routed row, float32 or bfloat16
    const void* ids;       // [tokens, slots]
    const float* weights;  // [tokens, slots], or null for ones
    void* out;             // [tokens, columns]
    int slots, columns, first_expert, experts;
    int long_ids, out_dtype;  // 0 bfloat16, 1 float16, 2 float32
    int narrow;               // y is bfloat16
};

// Grid: tokens by columns / 512, 128 threads of 4 columns. The sum runs over slots in order.
__device__ __forceinline__ void combine(const CombineArgs& args) {
    const int token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (column >= args.columns) return;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int slot = 0; slot < args.slots; ++slot) {
        const long long routed = static_cast<long long>(token) * args.slots + slot;
        const long long id = (args.long_ids ? static_cast<const long long*>(args.ids)[routed]
                                            : static_cast<const int*>(args.ids)[routed]) - args.first_expert;
        if (id < 0 || id >= args.experts) continue;
        const float weight = args.weights ? args.weights[routed] : 1.0f;
        const long long from = routed * args.columns + column;
        float4 y;
        if (args.narrow) {
            const ushort4 v = *reinterpret_cast<const ushort4*>(static_cast<const uint16_t*>(args.y) + from);
            y = make_float4(from_bfloat16(v.x), from_bfloat16(v.y), from_bfloat16(v.z), from_bfloat16(v.w));
        } else {
            y = *reinterpret_cast<const float4*>(static_cast<const float*>(args.y) + from);
        }
        sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
    }
    const long long at = static_cast<long long>(token) * args.columns + column;
    if (args.out_dtype == 2) {
        *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = sum;
        return;
    }
    uint16_t v[4];
    const float s[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (args.out_dtype == 0) v[i] = to_bfloat16(s[i]);
        else v[i] = to_float16(s[i]);
    }
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.out) + at) =
        make_uint2(v[0] | static_cast<uint32_t>(v[1]) << 16, v[2] | static_cast<uint32_t>(v[3]) << 16);
}

}  // namespace polymoe

extern "C" __global__ void __launch_bounds__(1024, 1) dispatch(const __grid_constant__ polymoe::DispatchArgs args) {
    polymoe::dispatch(args);
}

extern "C" __global__ void __launch_bounds__(32, 1) dispatch_few(const __grid_constant__ polymoe::DispatchArgs args) {
    polymoe::dispatch_few(args);
}

extern "C" __global__ void __launch_bounds__(256) spread(const __grid_constant__ polymoe::SpreadArgs args) {
    polymoe::spread(args);
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ polymoe::CombineArgs args) {
    polymoe::combine(args);
}
