#include "fp8.cuh"

namespace polymoe {

struct QuantizeArgs {
    const void* x;  // [rows, columns]
    uint8_t* out;   // [rows, fp8::row_bytes(columns)]
    int columns;
    int x_dtype;  // 0 bfloat16, 1 float16, 2 float32
};

// 16 of x's numbers.
__device__ __forceinline__ void load_x(const QuantizeArgs& args, long long from, float (&x)[16]) {
    if (args.x_dtype == 2) {
        const float4* v = reinterpret_cast<const float4*>(static_cast<const float*>(args.x) + from);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = v[i];
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
        return;
    }
    const uint4* v = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.x) + from);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 eight = v[i];
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
            x[8 * i + j] = args.x_dtype == 0 ? from_bfloat16(bits) : from_float16(bits);
        }
    }
}

// Rows in e4m3, with a scale for each 128 columns. Grid: rows by columns / (16 * threads); a thread has 16 columns.
__device__ __forceinline__ void quantize(const QuantizeArgs& args) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
    // x was complete before the kernel in front of this one let it start, and nobody reads `out` any more.
    let_next_kernel_start();
    float x[16] = {}, scale = 0.0f;
    if (column < args.columns) load_x(args, static_cast<long long>(blockIdx.x) * args.columns + column, x);
#pragma unroll
    for (int i = 0; i < 16; ++i) scale = fmaxf(scale, fabsf(x[i]));
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) scale = fmaxf(scale, __shfl_xor_sync(0xFFFFFFFFu, scale, lanes));
    scale /= 448.0f;
    if (scale == 0.0f) scale = 1.0f;
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = pack_e4m3(x[4 * i] / scale, x[4 * i + 1] / scale) |
                   pack_e4m3(x[4 * i + 2] / scale, x[4 * i + 3] / scale) << 16;
    }
    if (column < args.columns) {
        uint8_t* row = args.out + static_cast<long long>(blockIdx.x) * fp8::row_bytes(args.columns);
        *reinterpret_cast<uint4*>(row + column) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        if (column % 128 == 0) reinterpret_cast<float*>(row + args.columns)[column / 128] = scale;
    }
    wait_for_previous_kernel();  // whoever waits for this kernel relies on the one before having finished too
}

}  // namespace polymoe

extern "C" __global__ void __launch_bounds__(512) quantize(const __grid_constant__ polymoe::QuantizeArgs args) {
    polymoe::quantize(args);
}

POLYMOE_FP8_SIZES(gated, kGated)
POLYMOE_FP8_SIZES(down, kDown)
