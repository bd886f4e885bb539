// The narrowest MMA that holds a work tile's rows, and its accumulators.
#pragma once

namespace polymoe {

template <int N>
struct Width {
    static constexpr int value = N;
};

// Calls run(Width<N>) where N, or else the first of WIDER, is enough for `rows`. Each width is compiled on its own and
// keeps its accumulators in registers of its own.
template <int N, int... WIDER, class Run>
__device__ __forceinline__ void with_narrowest(int rows, Run run) {
    if constexpr (sizeof...(WIDER) > 0) {
        if (rows > N) return with_narrowest<WIDER...>(rows, run);
    }
    run(Width<N>{});
}

// The first COUNT accumulators of each block.
template <int COUNT, int BLOCKS, int MOST>
__device__ __forceinline__ void clear(float (&acc)[BLOCKS][MOST]) {
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) acc[m][i] = 0.0f;
    }
}

}  // namespace polymoe
