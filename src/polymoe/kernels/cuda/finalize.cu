// After the last GEMM: each token's weighted sum of its experts' rows of y.
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
    int long_ids, out_dtype;  // 0 bfloat16, 1 float16, 2 float32
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
                const long long id = (args.long_ids ? static_cast<const long long*>(args.ids)[expanded]
                                                    : static_cast<const int*>(args.ids)[expanded]) -
                                     args.first_expert;
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

}  // namespace polymoe

extern "C" __global__ void __launch_bounds__(128, 5) finalize_f32(const __grid_constant__ polymoe::FinalizeArgs args) {
    polymoe::finalize<false>(args);
}

// Few registers, so that many CTAs run at a time; the other has what the loads of eight experts at once take.
extern "C" __global__ void __launch_bounds__(128, 8) finalize_bf16(const __grid_constant__ polymoe::FinalizeArgs args) {
    polymoe::finalize<true>(args);
}
