// Where adapters of experts will change sums: every epilogue passes here, and functions without a body cost nothing.
#pragma once
#include "../gemm/args.cuh"

namespace polymoe {

// What two sums belong to: an expert, a row of h or y, and two of their columns. With a gate both columns are the same,
// the first sum is that of gate and the second that of up.
struct SumsAt {
    int expert, row, first, second;
};

// Of gate and up, with scales and biases.
__device__ __forceinline__ void before_activation(const GemmArgs& args, SumsAt at, float& first, float& second) {}

// Of down, with scales and biases. Router weights come later.
__device__ __forceinline__ void after_down(const GemmArgs& args, SumsAt at, float& first, float& second) {}

}  // namespace polymoe
