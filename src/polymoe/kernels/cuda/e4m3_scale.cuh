// How numbers are rounded to E4M3: divided by a scale.
#pragma once

namespace polymoe {

// The scale with which so large a number becomes the largest of E4M3; 1 for zero.
__device__ __forceinline__ float scale_of(float amax) {
    const float scale = amax / 448.0f;
    return scale == 0.0f ? 1.0f : scale;
}

__device__ __forceinline__ float inverse_of(float scale) { return fminf(1.0f / scale, 3.4028235e38f); }

// v / scale, rounded once, without the branches of `/`, which zeros would take. `inverse` is 1 / scale.
__device__ __forceinline__ float exact_divide(float v, float scale, float inverse) {
    const float q = v * inverse;
    return fmaf(fmaf(-q, scale, v), inverse, q);
}

}  // namespace polymoe
