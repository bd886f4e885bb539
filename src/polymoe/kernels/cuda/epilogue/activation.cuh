// Activations: the functions between the projections.
#pragma once
#include "../gemm/args.cuh"
#include "../ptx/convert.cuh"

namespace polymoe {

// SwiGLU with fast division and exponential: the last bits may differ.
__device__ __forceinline__ float fast_swiglu(const GemmArgs& args, float gate, float up) {
    const float limit = args.limit > 0 ? args.limit : __int_as_float(0x7F800000),
                power = args.alpha * -1.4426950408889634f;
    gate = min_nan(gate, limit), up = max_nan(min_nan(up, limit), -limit);
    return fast_divide(gate, 1.0f + exp2_approx(power * gate)) * (up + args.beta);
}

// The same, exactly.
__device__ __forceinline__ float swiglu(const GemmArgs& args, float gate, float up) {
    if (args.limit > 0) {
        gate = fminf(gate, args.limit);
        up = fminf(fmaxf(up, -args.limit), args.limit);
    }
    return gate / (1.0f + __expf(-args.alpha * gate)) * (up + args.beta);
}

// All others.
__device__ __forceinline__ float gated_activation(const GemmArgs& args, float gate, float up) {
    if (args.activation == kGelu) return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    const float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + __expf(-inner)) * up;
}

// How activations are computed: SwiGLU exactly or fast; or in a loop of its own, fast, and the others in another one.
enum Evaluation { kExact, kFast, kFastSwiglu, kOthers };

// h of two sums: `first` with a gate, or both.
template <int PART, Evaluation HOW>
__device__ __forceinline__ void activate(const GemmArgs& args, float& first, float& second) {
    if constexpr (PART == kUp) {
        first = HOW == kExact ? fmaxf(first, 0.0f) : max_nan(first, 0.0f);
        second = HOW == kExact ? fmaxf(second, 0.0f) : max_nan(second, 0.0f);
        first *= first, second *= second;
    } else if (HOW == kOthers || (HOW != kFastSwiglu && args.activation != kSwiglu)) {
        first = gated_activation(args, first, second);
    } else {
        first = HOW == kExact ? swiglu(args, first, second) : fast_swiglu(args, first, second);
    }
}

template <Evaluation HOW>
struct Evaluates {
    static constexpr Evaluation how = HOW;
};

// Calls store(Evaluates<HOW>) with the one way in which all sums are evaluated: of all kinds of activation in one loop,
// the code that runs would leave the instruction cache.
template <int PART, class Store>
__device__ __forceinline__ void for_activation(const GemmArgs& args, Store store) {
    if (PART != kGateUp || args.activation == kSwiglu) {
        store(Evaluates<kFastSwiglu>{});
    } else {
        store(Evaluates<kOthers>{});
    }
}

}  // namespace polymoe
