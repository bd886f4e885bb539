// The narrowest MMA that holds a work tile's rows.
#pragma once

namespace polymoe {

// Calls the mainloop's mma_stages<N> or, where there are more rows, that of the next of WIDER. Each width is compiled
// on its own and keeps its accumulators in registers of its own.
template <int N, int... WIDER, class Mainloop>
__device__ __forceinline__ void run_narrowest(Mainloop& mainloop, int stages, int rows) {
    if constexpr (sizeof...(WIDER) > 0) {
        if (rows > N) return run_narrowest<WIDER...>(mainloop, stages, rows);
    }
    mainloop.template mma_stages<N>(stages);
}

}  // namespace polymoe
