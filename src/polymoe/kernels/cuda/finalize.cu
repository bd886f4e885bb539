// After the last GEMM: each token's weighted sum of its experts' rows of y.
#include "entry.cuh"
#include "expert_ids.cuh"
#include "permuted_row.cuh"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"

namespace polymoe {

struct FinalizeArgs {
    const void* y;                            // [rows, columns]: float32, or bfloat16 (finalize_bf16)
    const PermutedRow* expanded_to_permuted;  // [tokens, top_k]: y is by permuted row; or null: y is by expanded row
    const void* ids;                          // [tokens, top_k]
    const float* weights;                     // [tokens, top_k], or null for ones
    void* out;                                // [tokens, columns]
    int top_k, columns, first_expert, experts;
    int long_ids, out_dtype;     // 0 bfloat16, 1 float16, 2 float32
    int tokens, tokens_per_cta;  // finalize_many_bf16
};

// Adds sixteen bytes of y times a weight.
__device__ __forceinline__ void add_words(float* sum, uint4 v, float weight, bool bf16) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (bf16) {
            sum[2 * i] += weight * __uint_as_float(words[i] << 16);
            sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xFFFF0000u);
        } else {
            sum[i] += weight * __uint_as_float(words[i]);
        }
    }
}

// A token's sum, in its dtype.
__device__ __forceinline__ void store_sum(const FinalizeArgs& args, int token, int column, const float* sum) {
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
                       ? pack_bf16x2(sum[2 * i], sum[2 * i + 1])
                       : f32_to_f16(sum[2 * i]) | static_cast<uint32_t>(f32_to_f16(sum[2 * i + 1])) << 16;
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.out) + to) =
        make_uint4(words[0], words[1], words[2], words[3]);
}

// Grid: tokens by columns / 1024, 128 threads of 8 columns. The sum runs over the token's experts in order.
template <bool BF16>
__device__ __forceinline__ void finalize(const FinalizeArgs& args) {
    constexpr int kAtOnce = 8, kLoads = BF16 ? 1 : 2;  // experts whose loads are in flight together
    const int token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 8, lane = threadIdx.x % 32;
    const uint4* from = static_cast<const uint4*>(args.y) + column / 8 * kLoads;
    const long long step = args.columns / 8 * kLoads;
    // The permutation, ids and weights are older than the kernel ahead of this one, which waited for its own
    // predecessor before it let this one start.
    float sum[8] = {};
    for (int first = 0; first < args.top_k; first += 32) {  // a lane looks up an expanded row for all
        int row = -1;
        float weight = 0.0f;
        if (first + lane < args.top_k) {
            const long long expanded = static_cast<long long>(token) * args.top_k + first + lane;
            weight = args.weights ? args.weights[expanded] : 1.0f;
            if (args.expanded_to_permuted) {
                row = args.expanded_to_permuted[expanded].permuted_row;
            } else {
                const long long id = expert_id(args, expanded) - args.first_expert;
                if (id >= 0 && id < args.experts) row = static_cast<int>(expanded);
            }
        }
        if (first == 0) {
            grid_dependency_wait();
            launch_dependents();
        }
        const int slots = min(32, args.top_k - first);
        for (int start = 0; start < slots; start += kAtOnce) {
            uint4 y[kAtOnce][kLoads];
            float by[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int y_row = __shfl_sync(0xFFFFFFFFu, row, start + i);  // beyond the last expert: -1
                const bool valid = y_row >= 0 && column < args.columns;
                by[i] = __shfl_sync(0xFFFFFFFFu, weight, start + i);
                if (!valid) by[i] = 0.0f;
#pragma unroll
                for (int l = 0; l < kLoads; ++l) {
                    y[i][l] = ld_global_v4_if(valid, from + y_row * step + l);
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int l = 0; l < kLoads; ++l) add_words(sum + 4 * l, y[i][l], by[i], BF16);
            }
        }
    }
    if (column >= args.columns) return;
    store_sum(args, token, column, sum);
}

// The position of the n-th set bit, counted from 0; 31 where there are fewer.
__device__ __forceinline__ int nth_set_bit(uint32_t bits, int n) {
    int at = 0;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
        const int below = __popc(bits >> at & ((1u << width) - 1));
        if (below <= n) n -= below, at += width;
    }
    return at;
}

// The same for many tokens, with the same bits: tokens_per_cta tokens a CTA, of together at most 32 expanded rows. Only
// rows that are there are loaded, eight of all tokens at a time: with few experts a token, or few local ones, a token's
// own do not keep memory busy.
__device__ __forceinline__ void finalize_many(const FinalizeArgs& args) {
    constexpr uint32_t kAll = 0xFFFFFFFFu;
    constexpr int kAtOnce = 8;
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8, lane = threadIdx.x % 32;
    const int first_token = blockIdx.x * args.tokens_per_cta;
    const int tokens = min(args.tokens_per_cta, args.tokens - first_token);
    const bool stores = column < args.columns;
    const uint4* from = static_cast<const uint4*>(args.y) + column / 8;
    int row = -1, token = lane / args.top_k;  // of the CTA's tokens
    float weight = 0.0f;
    if (token < tokens) {
        const long long expanded = static_cast<long long>(first_token) * args.top_k + lane;
        weight = args.weights ? args.weights[expanded] : 1.0f;
        row = args.expanded_to_permuted[expanded].permuted_row;
    }
    const uint32_t found = __ballot_sync(kAll, row >= 0), of_one = (1u << args.top_k) - 1;
    uint32_t without = __ballot_sync(kAll, lane < tokens && !(found & of_one << lane * args.top_k));
    const int count = __popc(found), source = nth_set_bit(found, lane);  // rows that are there go first
    row = __shfl_sync(kAll, row, source), token = __shfl_sync(kAll, token, source);
    weight = __shfl_sync(kAll, weight, source);
    grid_dependency_wait();
    launch_dependents();
    float sum[8] = {};
    for (; without; without &= without - 1) {
        if (stores) store_sum(args, first_token + __ffs(without) - 1, column, sum);
    }
    int summed = __shfl_sync(kAll, token, 0);
    for (int start = 0; start < count; start += kAtOnce) {
        uint4 y[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const long long y_row = __shfl_sync(kAll, row, start + i);
            y[i] = ld_global_v4_if(start + i < count && stores, from + y_row * (args.columns / 8));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (start + i >= count) break;
            const int of = __shfl_sync(kAll, token, start + i);
            const float by = __shfl_sync(kAll, weight, start + i);
            if (of != summed) {
                if (stores) store_sum(args, first_token + summed, column, sum);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] = 0.0f;
                summed = of;
            }
            add_words(sum, y[i], by, true);
        }
    }
    if (count && stores) store_sum(args, first_token + summed, column, sum);
}

}  // namespace polymoe

POLYMOE_KERNEL(finalize_f32, FinalizeArgs, (128, 5), finalize<false>)
// Few registers, so that many CTAs run at a time; the other has what the loads of eight experts at once take.
POLYMOE_KERNEL(finalize_bf16, FinalizeArgs, (128, 8), finalize<true>)
// With one CTA more to an SM registers spill.
POLYMOE_KERNEL(finalize_many_bf16, FinalizeArgs, (128, 7), finalize_many)
