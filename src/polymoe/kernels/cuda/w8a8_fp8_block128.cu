#include "w8a8.cuh"

extern "C" __global__ void __launch_bounds__(512) quantize_in_pairs(const __grid_constant__ polymoe::QuantizeRowsArgs args) {
    polymoe::quantize_rows<true>(args);
}

POLYMOE_W8A8_SIZES(gated, kGated)
POLYMOE_W8A8_SIZES(down, kDown)
