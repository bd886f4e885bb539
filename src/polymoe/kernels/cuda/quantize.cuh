// Rows of x rounded to e4m3.
#pragma once
#include "e4m3.cuh"
#include "ptx.cuh"

namespace polymoe {

// 16 numbers of x from number `from` on. dtype: 0 bfloat16, 1 float16, 2 float32.
__device__ __forceinline__ void load_x(const void* from_x, int dtype, long long from, float (&x)[16]) {
    if (dtype == 2) {
        const float4* v = reinterpret_cast<const float4*>(static_cast<const float*>(from_x) + from);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = v[i];
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
        return;
    }
    const uint4* v = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from_x) + from);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 eight = v[i];
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
            x[8 * i + j] = dtype == 0 ? from_bfloat16(bits) : from_float16(bits);
        }
    }
}

// 16 of a row's columns in e4m3, and the scale of the 128 that eight neighbouring lanes have: 1 if all are zeros.
__device__ __forceinline__ uint4 round_to_e4m3(const float (&x)[16], float& scale) {
    scale = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) scale = fmaxf(scale, fabsf(x[i]));
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) scale = fmaxf(scale, __shfl_xor_sync(0xFFFFFFFFu, scale, lanes));
    scale /= 448.0f;
    if (scale == 0.0f) scale = 1.0f;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = pack_e4m3(x[4 * i] / scale, x[4 * i + 1] / scale) |
                   pack_e4m3(x[4 * i + 2] / scale, x[4 * i + 3] / scale) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The columns' order in which bytes in pairs are the left operand of products (w8a8.cuh): of each 16 columns, for each t
// those from 2t on and from 8 + 2t on, two each.
__device__ __forceinline__ uint4 in_pairs(uint4 codes) {
    return make_uint4(bytes_of(make_uint2(codes.x, codes.z), 0x5410), bytes_of(make_uint2(codes.x, codes.z), 0x7632),
                      bytes_of(make_uint2(codes.y, codes.w), 0x5410), bytes_of(make_uint2(codes.y, codes.w), 0x7632));
}

// Bytes of a row in e4m3: its codes and behind them its scales.
__host__ __device__ constexpr int row_bytes(int columns) { return columns + (columns / 32 + 15) / 16 * 16; }

struct QuantizeRowsArgs {
    const void* x;  // [rows, columns]
    uint8_t* out;   // [rows, row_bytes(columns)]
    int columns;
    int x_dtype;  // 0 bfloat16, 1 float16, 2 float32
};

// Rows in e4m3, with a scale for each 128 columns. Grid: rows by columns / (16 * threads); a thread has 16 columns.
template <bool IN_PAIRS>
__device__ __forceinline__ void quantize_rows(const QuantizeRowsArgs& args) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
    // x was complete before the kernel in front of this one let it start, and nobody reads `out` any more.
    let_next_kernel_start();
    float x[16] = {}, scale;
    if (column < args.columns) load_x(args.x, args.x_dtype, static_cast<long long>(blockIdx.x) * args.columns + column, x);
    const uint4 codes = round_to_e4m3(x, scale);
    if (column < args.columns) {
        uint8_t* row = args.out + static_cast<long long>(blockIdx.x) * row_bytes(args.columns);
        *reinterpret_cast<uint4*>(row + column) = IN_PAIRS ? in_pairs(codes) : codes;
        if (column % 128 == 0) reinterpret_cast<float*>(row + args.columns)[column / 128] = scale;
    }
    wait_for_previous_kernel();  // whoever waits for this kernel relies on the one before having finished too
}

}  // namespace polymoe
