#include "fp8.cuh"
#include "quantize.cuh"

namespace polymoe {

struct QuantizeRowsArgs {
    const void* x;  // [rows, columns]
    uint8_t* out;   // [rows, fp8::row_bytes(columns)]
    int columns;
    int x_dtype;  // 0 bfloat16, 1 float16, 2 float32
};

// Rows in e4m3, with a scale for each 128 columns. Grid: rows by columns / (16 * threads); a thread has 16 columns.
__device__ __forceinline__ void quantize(const QuantizeRowsArgs& args) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
    // x was complete before the kernel in front of this one let it start, and nobody reads `out` any more.
    let_next_kernel_start();
    float x[16] = {}, scale;
    if (column < args.columns) load_x(args.x, args.x_dtype, static_cast<long long>(blockIdx.x) * args.columns + column, x);
    const uint4 codes = round_to_e4m3(x, scale);
    if (column < args.columns) {
        uint8_t* row = args.out + static_cast<long long>(blockIdx.x) * fp8::row_bytes(args.columns);
        *reinterpret_cast<uint4*>(row + column) = codes;
        if (column % 128 == 0) reinterpret_cast<float*>(row + args.columns)[column / 128] = scale;
    }
    wait_for_previous_kernel();  // whoever waits for this kernel relies on the one before having finished too
}

}  // namespace polymoe

extern "C" __global__ void __launch_bounds__(512) quantize(const __grid_constant__ polymoe::QuantizeRowsArgs args) {
    polymoe::quantize(args);
}

POLYMOE_FP8_SIZES(gated, kGated)
POLYMOE_FP8_SIZES(down, kDown)
