// Division by a scale, for rounding to E4M3: without the branches of `/`, which zeros would take.
#pragma once

namespace polymoe {

// v / scale, rounded once; `inverse` is 1 / scale.
__device__ __forceinline__ float exact_divide(float v, float scale, float inverse) {
    const float q = v * inverse;
    return fmaf(fmaf(-q, scale, v), inverse, q);
}

}  // namespace polymoe
