// x to E4M3 with a float32 scale for each row and 128 columns, to permuted tiles or row by row; and x or h row by row
// with one scale for a row.
#include "permuted_row.cuh"
#include "dequant/e4m3.cuh"
#include "exact_divide.cuh"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "sizes.cuh"

namespace polymoe {

// 16 elements of x from number `first` on. dtype: 0 bfloat16, 1 float16, 2 float32.
__device__ __forceinline__ void load_x(const void* all, int dtype, long long first, float (&x)[16]) {
    if (dtype == 2) {
        const float4* v = reinterpret_cast<const float4*>(static_cast<const float*>(all) + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = v[i];
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
        return;
    }
    const uint4* v = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(all) + first);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 eight = v[i];
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
            x[8 * i + j] = dtype == 0 ? bf16_to_f32(bits) : f16_to_f32(bits);
        }
    }
}

// 16 of a row's columns in E4M3, and the scale of the 128 that eight neighbouring lanes have: 1 if all are zeros.
__device__ __forceinline__ uint4 quantize_e4m3(const float (&x)[16], float& scale) {
    scale = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) scale = fmaxf(scale, fabsf(x[i]));
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) scale = fmaxf(scale, __shfl_xor_sync(0xFFFFFFFFu, scale, lanes));
    scale /= 448.0f;
    if (scale == 0.0f) scale = 1.0f;
    const float inverse = fminf(1.0f / scale, 3.4028235e38f);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = exact_divide(x[4 * i + j], scale, inverse);
        words[i] = pack_e4m3x2(y[0], y[1]) | pack_e4m3x2(y[2], y[3]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The order of columns that gemm/w8a8.cuh needs: of each 16, for each t those from 2t on and from 8 + 2t on, two each.
__device__ __forceinline__ uint4 pair_columns(uint4 codes) {
    return make_uint4(prmt(make_uint2(codes.x, codes.z), 0x5410), prmt(make_uint2(codes.x, codes.z), 0x7632),
                      prmt(make_uint2(codes.y, codes.w), 0x5410), prmt(make_uint2(codes.y, codes.w), 0x7632));
}

struct QuantizePermutedArgs {
    const void* x;                            // [tokens, columns]
    uint8_t* out;                             // for each work tile, for each 128 columns, a tile; then the rows' scales
    const PermutedRow* expanded_to_permuted;  // [tokens, top_k]
    int columns, top_k;                       // columns: a multiple of 16
    int x_dtype;                              // 0 bfloat16, 1 float16, 2 float32
};

// To permuted tiles, as epilogue_e4m3.cuh describes them, with columns paired or not; missing columns of the last tile
// are zeros. Grid: tokens by columns / 4096, 256 threads of 16 columns. A token is rounded once, for all its experts.
template <bool PAIRED>
__device__ __forceinline__ void quantize_permuted(const QuantizePermutedArgs& args) {
    const int token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 16, lane = threadIdx.x % 32;
    // x was complete before the kernel ahead of this one let it start.
    float x[16] = {}, scale;
    if (column < args.columns) load_x(args.x, args.x_dtype, static_cast<long long>(token) * args.columns + column, x);
    uint4 codes = quantize_e4m3(x, scale);
    if (PAIRED) codes = pair_columns(codes);
    grid_dependency_wait();
    launch_dependents();
    const int blocks = (args.columns + 127) / 128;
    for (int first = 0; first < args.top_k; first += 32) {  // a lane looks up an expanded row for all
        PermutedRow place = {-1, 0, 0, 0};
        if (first + lane < args.top_k) {
            place = args.expanded_to_permuted[static_cast<long long>(token) * args.top_k + first + lane];
        }
        const int slots = min(32, args.top_k - first);
        for (int slot = 0; slot < slots; ++slot) {
            if (__shfl_sync(0xFFFFFFFFu, place.permuted_row, slot) < 0) continue;
            const int tile_row = __shfl_sync(0xFFFFFFFFu, place.tile_row, slot);
            const int row = __shfl_sync(0xFFFFFFFFu, place.row, slot);
            const int padded = __shfl_sync(0xFFFFFFFFu, place.padded_rows, slot);
            if (column < blocks * 128) {
                uint8_t* out = args.out + static_cast<long long>(tile_row) * blocks * kE4m3RowBytes;
                const int tile = column / 128 * padded + row, chunk = (column / 16 % 8) ^ (row % 8);
                *reinterpret_cast<uint4*>(out + tile * 128 + chunk * 16) = codes;
                if (column % 128 == 0) reinterpret_cast<float*>(out + blocks * padded * 128)[tile] = scale;
            }
        }
    }
}

struct QuantizeRowsArgs {
    const void* x;  // [rows, columns]
    uint8_t* out;   // [rows, w8::row_bytes(columns)]: a row's codes and behind them its scales
    int columns;
    int x_dtype;  // 0 bfloat16, 1 float16, 2 float32
};

// Row by row, with columns paired or not. Grid: rows by columns / (16 * threads); a thread has 16 columns.
template <bool PAIRED>
__device__ __forceinline__ void quantize_rows(const QuantizeRowsArgs& args) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
    // x was complete before the kernel ahead of this one let it start, and nothing reads `out` any more.
    launch_dependents();
    float x[16] = {}, scale;
    if (column < args.columns)
        load_x(args.x, args.x_dtype, static_cast<long long>(blockIdx.x) * args.columns + column, x);
    const uint4 codes = quantize_e4m3(x, scale);
    if (column < args.columns) {
        uint8_t* row = args.out + static_cast<long long>(blockIdx.x) * w8::row_bytes(args.columns);
        *reinterpret_cast<uint4*>(row + column) = PAIRED ? pair_columns(codes) : codes;
        if (column % 128 == 0) reinterpret_cast<float*>(row + args.columns)[column / 128] = scale;
    }
    grid_dependency_wait();  // the next kernel relies on this one having waited for the kernel ahead of it
}

struct QuantizeWholeRowsArgs {
    const void* x;  // [rows, columns]
    uint8_t* out;   // [rows, w8::row_bytes(columns)]: a row's codes and behind them its scale; or permuted tiles
    // Where each expanded row is to go. Or null: out has the rows of x.
    const PermutedRow* expanded_to_permuted;
    const float* input_scales;  // [E]: those of all rows of an expert; or null: of the row's maximum
    const void* ids;            // [expanded rows]: expert ids, where there are input scales
    int rows;                   // expanded rows, or where out has the rows of x, these
    int columns;                // a multiple of 16, for tiles of 128
    int x_dtype;                // 0 bfloat16, 1 float16, 2 float32
    int top_k;                  // where x is by token; 0 where it is by permuted row
    int tiles;                  // whether out is permuted tiles, as epilogue_e4m3.cuh describes them
    int threads;                // for a row, each with every so many 16 columns: a multiple of 32
    int first_expert, long_ids;
};

// The scale of a row of which each of `threads` threads has a maximum: 1 if all are zeros. (quantize_whole_rows, with
// this function, would become other machine code than what was measured.)
__device__ __forceinline__ float row_scale(float scale, float* maxima, int row_of_cta, int threads) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) scale = fmaxf(scale, __shfl_xor_sync(0xFFFFFFFFu, scale, lanes));
    if (threads > 32) {
        const int warps = threads / 32, warp = row_of_cta * warps;
        if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = scale;
        __syncthreads();
        for (int i = 0; i < warps; ++i) scale = fmaxf(scale, maxima[warp + i]);
    }
    scale /= 448.0f;
    if (scale == 0.0f) scale = 1.0f;
    return scale;
}

__device__ __forceinline__ uint4 round_e4m3(float (&x)[16], float scale, float inverse) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[4 * i + j] = exact_divide(x[4 * i + j], scale, inverse);
        words[i] = pack_e4m3x2(x[4 * i], x[4 * i + 1]) | pack_e4m3x2(x[4 * i + 2], x[4 * i + 3]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Grid: the rows, as many at a time as a CTA has threads for.
template <bool PAIRED>
__device__ __forceinline__ void quantize_whole_rows(const QuantizeWholeRowsArgs& args) {
    __shared__ float maxima[16];
    const int row_of_cta = threadIdx.x / args.threads, thread = threadIdx.x - row_of_cta * args.threads;
    const int number = blockIdx.x * (blockDim.x / args.threads) + row_of_cta;
    if (args.expanded_to_permuted) grid_dependency_wait();
    launch_dependents();
    PermutedRow place = {number < args.rows ? number : -1, 0, 0, 0};
    long long from = number;
    if (args.expanded_to_permuted && number < args.rows) {
        place = args.expanded_to_permuted[number];
        from = args.top_k ? number / args.top_k : place.permuted_row;
    }
    const bool there = place.permuted_row >= 0;
    const int first = thread * 16, step = args.threads * 16;
    const bool once = args.columns <= step;
    float x[16] = {}, scale = 0.0f;
    if (there && (once || !args.input_scales)) {
        for (int column = first; column < args.columns; column += step) {
            load_x(args.x, args.x_dtype, from * args.columns + column, x);
#pragma unroll
            for (int i = 0; i < 16; ++i) scale = fmaxf(scale, fabsf(x[i]));
        }
    }
    if (args.input_scales) {
        if (!there) return;
        const long long id =
            args.long_ids ? static_cast<const long long*>(args.ids)[number] : static_cast<const int*>(args.ids)[number];
        scale = args.input_scales[id - args.first_expert];
    } else {
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) scale = fmaxf(scale, __shfl_xor_sync(0xFFFFFFFFu, scale, lanes));
        if (args.threads > 32) {
            const int warps = args.threads / 32, warp = row_of_cta * warps;
            if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = scale;
            __syncthreads();
            for (int i = 0; i < warps; ++i) scale = fmaxf(scale, maxima[warp + i]);
        }
        scale /= 448.0f;
        if (scale == 0.0f) scale = 1.0f;
        if (!there) return;
    }
    const float inverse = fminf(1.0f / scale, 3.4028235e38f);
    const int blocks = args.columns / 128;
    const long long tile_row = static_cast<long long>(place.tile_row) * blocks * kE4m3RowBytes;
    uint8_t* row =
        args.out + (args.tiles ? tile_row : place.permuted_row * static_cast<long long>(w8::row_bytes(args.columns)));
    for (int column = first; column < args.columns; column += step) {
        if (!once) load_x(args.x, args.x_dtype, from * args.columns + column, x);
        const uint4 codes = round_e4m3(x, scale, inverse);
        const int chunk = (column / 16 % 8) ^ (place.row % 8);
        const int at = args.tiles ? (column / 128 * place.padded_rows + place.row) * 128 + chunk * 16 : column;
        *reinterpret_cast<uint4*>(row + at) = PAIRED ? pair_columns(codes) : codes;
        if (column == 0) {
            const int scale_at = args.tiles ? blocks * place.padded_rows * 128 + place.row * 4 : args.columns;
            *reinterpret_cast<float*>(row + scale_at) = scale;
        }
    }
    // The next kernel relies on this one having waited for the kernel ahead of it.
    if (!args.expanded_to_permuted) grid_dependency_wait();
}

// To permuted tiles whatever the number of columns; missing ones of the last tile are zeros. A token's row is rounded
// once for all its experts, unless scales are those of the experts. Grid: x's rows then, or expanded rows, as many at a
// time as a CTA has threads for.
__device__ __forceinline__ void quantize_row_tiles(const QuantizeWholeRowsArgs& args) {
    __shared__ float maxima[16];
    const int row_of_cta = threadIdx.x / args.threads, thread = threadIdx.x - row_of_cta * args.threads;
    const int number = blockIdx.x * (blockDim.x / args.threads) + row_of_cta;
    const int copies = args.top_k && !args.input_scales ? args.top_k : 1;
    // Down reads nothing but h that is not there when h's rounding starts. So it may start, too, and copy weights.
    if (!args.top_k) launch_dependents();
    grid_dependency_wait();
    if (args.top_k) launch_dependents();
    const PermutedRow* places = args.expanded_to_permuted + static_cast<long long>(number) * copies;
    const bool there = number < args.rows && (copies > 1 || places->permuted_row >= 0);
    const long long from = copies > 1 ? number : !there ? 0 : args.top_k ? number / args.top_k : places->permuted_row;
    const int first = thread * 16, step = args.threads * 16, blocks = (args.columns + 127) / 128;
    const bool once = blocks * 128 <= step;
    float x[16] = {}, scale = 0.0f;
    if (there && (once || !args.input_scales)) {
        for (int column = first; column < args.columns; column += step) {
            load_x(args.x, args.x_dtype, from * args.columns + column, x);
#pragma unroll
            for (int i = 0; i < 16; ++i) scale = fmaxf(scale, fabsf(x[i]));
        }
    }
    if (args.input_scales) {
        if (!there) return;
        const long long id =
            args.long_ids ? static_cast<const long long*>(args.ids)[number] : static_cast<const int*>(args.ids)[number];
        scale = args.input_scales[id - args.first_expert];
    } else {
        scale = row_scale(scale, maxima, row_of_cta, args.threads);
        if (!there) return;
    }
    const float inverse = fminf(1.0f / scale, 3.4028235e38f);
    for (int column = first; column < blocks * 128; column += step) {
        if (!once) {
#pragma unroll
            for (int i = 0; i < 16; ++i) x[i] = 0.0f;
            if (column < args.columns) load_x(args.x, args.x_dtype, from * args.columns + column, x);
        }
        const uint4 codes = round_e4m3(x, scale, inverse);
        for (int i = 0; i < copies; ++i) {
            const PermutedRow place = places[i];
            if (place.permuted_row < 0) continue;
            uint8_t* tile = args.out + static_cast<long long>(place.tile_row) * blocks * kE4m3RowBytes;
            const int at = column / 128 * place.padded_rows + place.row, chunk = (column / 16 % 8) ^ (place.row % 8);
            *reinterpret_cast<uint4*>(tile + at * 128 + chunk * 16) = codes;
            if (column == 0) reinterpret_cast<float*>(tile + blocks * place.padded_rows * 128)[place.row] = scale;
        }
    }
}

}  // namespace polymoe

extern "C" __global__ void __launch_bounds__(256)
    quantize_permuted(const __grid_constant__ polymoe::QuantizePermutedArgs args) {
    polymoe::quantize_permuted<false>(args);
}

extern "C" __global__ void __launch_bounds__(256)
    quantize_permuted_paired(const __grid_constant__ polymoe::QuantizePermutedArgs args) {
    polymoe::quantize_permuted<true>(args);
}

extern "C" __global__ void __launch_bounds__(512)
    quantize_rows(const __grid_constant__ polymoe::QuantizeRowsArgs args) {
    polymoe::quantize_rows<false>(args);
}

extern "C" __global__ void __launch_bounds__(512)
    quantize_rows_paired(const __grid_constant__ polymoe::QuantizeRowsArgs args) {
    polymoe::quantize_rows<true>(args);
}

extern "C" __global__ void __launch_bounds__(512)
    quantize_whole_rows(const __grid_constant__ polymoe::QuantizeWholeRowsArgs args) {
    polymoe::quantize_whole_rows<false>(args);
}

extern "C" __global__ void __launch_bounds__(512)
    quantize_whole_rows_paired(const __grid_constant__ polymoe::QuantizeWholeRowsArgs args) {
    polymoe::quantize_whole_rows<true>(args);
}

extern "C" __global__ void __launch_bounds__(512)
    quantize_row_tiles(const __grid_constant__ polymoe::QuantizeWholeRowsArgs args) {
    polymoe::quantize_row_tiles(args);
}
