#include "fp8.cuh"

extern "C" __global__ void __launch_bounds__(512) quantize(const __grid_constant__ polymoe::QuantizeRowsArgs args) {
    polymoe::quantize_rows<false>(args);
}

POLYMOE_FP8_SIZES(gated, kGated)
POLYMOE_FP8_SIZES(down, kDown)
