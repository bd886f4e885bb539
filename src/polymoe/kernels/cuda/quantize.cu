// x to E4M3 with a float32 scale for each row and 128 columns, to permuted tiles or row by row; and x or h row by row
// with one scale for a row.
#include "dequant/e4m3.cuh"
#include "e4m3_scale.cuh"
#include "entry.cuh"
#include "expert_ids.cuh"
#include "permuted_row.cuh"
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

__device__ __forceinline__ float max_magnitude(const float (&x)[16], float most = 0.0f) {
#pragma unroll
    for (int i = 0; i < 16; ++i) most = fmaxf(most, fabsf(x[i]));
    return most;
}

// The largest value of `LANES` neighbouring lanes.
template <int LANES>
__device__ __forceinline__ float max_of_lanes(float value) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, lanes));
    return value;
}

// 16 columns in E4M3, of which x keeps nothing: no register is taken for it while codes are stored.
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

// Where a row's codes and scales go: to a row of its own, or to permuted tiles, as epilogue/e4m3_tiles.cuh describes
// them.
struct Destination {
    uint8_t* out;  // the row, or the work tile's tiles
    float* scales;
    bool tiles;
    int row, padded_rows;  // of the work tile

    static __device__ __forceinline__ Destination of_row(uint8_t* rows, int columns, int number) {
        uint8_t* out = rows + number * static_cast<long long>(w8::row_bytes(columns));
        return {out, reinterpret_cast<float*>(out + columns), false, 0, 0};
    }

    static __device__ __forceinline__ Destination of_tiles(uint8_t* tiles, int blocks, PermutedRow place) {
        uint8_t* out = tiles + static_cast<long long>(place.tile_row) * blocks * kE4m3RowBytes;
        return {out, reinterpret_cast<float*>(out + blocks * place.padded_rows * 128), true, place.row,
                place.padded_rows};
    }

    // 16 columns.
    __device__ __forceinline__ void store(int column, uint4 codes) const {
        const int tile = column / 128 * padded_rows + row, chunk = (column / 16 % 8) ^ (row % 8);
        *reinterpret_cast<uint4*>(out + (tiles ? tile * 128 + chunk * 16 : column)) = codes;
    }

    // Of 128 columns.
    __device__ __forceinline__ void store_scale(int block, float scale) const {
        scales[tiles ? block * padded_rows + row : block] = scale;
    }
};

struct QuantizePermutedArgs {
    const void* x;                            // [tokens, columns]; or h by permuted row, where top_k is 0
    uint8_t* out;                             // for each work tile, for each 128 columns, a tile; then the rows' scales
    const PermutedRow* expanded_to_permuted;  // [tokens, top_k]
    int columns, top_k;                       // columns: a multiple of 16
    int x_dtype;                              // 0 bfloat16, 1 float16, 2 float32
};

// A scale for each 128 columns, which eight neighbouring lanes have, and permuted tiles; missing columns of the last
// are zeros. Grid: tokens, or expanded rows of h, by columns / 4096, 256 threads of 16 columns. A token is rounded
// once, for all its experts.
__device__ __forceinline__ void quantize_permuted(const QuantizePermutedArgs& args) {
    const int token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 16, lane = threadIdx.x % 32;
    const bool of_h = args.top_k == 0;
    const int copies = of_h ? 1 : args.top_k;
    int from = token;
    if (of_h) {
        launch_dependents();  // down may copy weights: all else that it reads is not there before this kernel ends
        grid_dependency_wait();
        from = args.expanded_to_permuted[token].permuted_row;
        if (from < 0) return;
    }
    // x was complete before the kernel ahead of this one let it start.
    float x[16] = {};
    if (column < args.columns) load_x(args.x, args.x_dtype, static_cast<long long>(from) * args.columns + column, x);
    const float scale = scale_of(max_of_lanes<8>(max_magnitude(x)));
    const uint4 codes = round_e4m3(x, scale, inverse_of(scale));
    if (!of_h) {
        grid_dependency_wait();
        launch_dependents();
    }
    const int blocks = (args.columns + 127) / 128;
    for (int first = 0; first < copies; first += 32) {  // a lane looks up an expanded row for all
        PermutedRow place = {-1, 0, 0, 0};
        if (first + lane < copies) {
            place = args.expanded_to_permuted[static_cast<long long>(token) * copies + first + lane];
        }
        const int slots = min(32, copies - first);
        for (int slot = 0; slot < slots; ++slot) {
            if (__shfl_sync(0xFFFFFFFFu, place.permuted_row, slot) < 0) continue;
            const int tile_row = __shfl_sync(0xFFFFFFFFu, place.tile_row, slot);
            const int row = __shfl_sync(0xFFFFFFFFu, place.row, slot);
            const int padded_rows = __shfl_sync(0xFFFFFFFFu, place.padded_rows, slot);
            if (column >= blocks * 128) continue;
            const Destination to = Destination::of_tiles(args.out, blocks, PermutedRow{0, tile_row, row, padded_rows});
            to.store(column, codes);
            if (column % 128 == 0) to.store_scale(column / 128, scale);
        }
    }
}

struct QuantizeRowsArgs {
    const void* x;  // [rows, columns]
    uint8_t* out;   // [rows, w8::row_bytes(columns)]: a row's codes and behind them its scales
    int columns;
    int x_dtype;  // 0 bfloat16, 1 float16, 2 float32
};

// A scale for each 128 columns, row by row. Grid: rows by columns / (16 * threads); a thread has 16 columns.
__device__ __forceinline__ void quantize_rows(const QuantizeRowsArgs& args) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
    // x was complete before the kernel ahead of this one let it start, and nothing reads `out` any more.
    launch_dependents();
    float x[16] = {};
    if (column < args.columns)
        load_x(args.x, args.x_dtype, static_cast<long long>(blockIdx.x) * args.columns + column, x);
    const float scale = scale_of(max_of_lanes<8>(max_magnitude(x)));
    const uint4 codes = round_e4m3(x, scale, inverse_of(scale));
    if (column < args.columns) {
        const Destination to = Destination::of_row(args.out, args.columns, blockIdx.x);
        to.store(column, codes);
        if (column % 128 == 0) to.store_scale(column / 128, scale);
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
    int rows;                   // expanded rows, or where out has the rows of x, or x's are rounded once, these
    int columns;                // a multiple of 16
    int x_dtype;                // 0 bfloat16, 1 float16, 2 float32
    int top_k;                  // where x is by token; 0 where it is by permuted row
    int tiles;                  // whether out is permuted tiles, as epilogue/e4m3_tiles.cuh describes them
    int threads;                // for a row, each with every so many 16 columns: a multiple of 32
    int first_expert, long_ids;
};

// The largest value of the `threads` threads that have a row. `maxima`: room for a value of each of the CTA's warps.
__device__ __forceinline__ float max_of_row(float value, float* maxima, int row_of_cta, int threads) {
    value = max_of_lanes<32>(value);
    if (threads > 32) {
        const int warps = threads / 32, warp = row_of_cta * warps;
        if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = value;
        __syncthreads();
        for (int i = 0; i < warps; ++i) value = fmaxf(value, maxima[warp + i]);
    }
    return value;
}

// One scale for a row. EXPERTS: to permuted tiles, with zeros for missing columns of the last, and a token's row once
// for all its experts unless scales are theirs. Grid: rows, as many at a time as a CTA has threads for.
template <bool EXPERTS>
__device__ __forceinline__ void quantize_whole_rows(const QuantizeWholeRowsArgs& args) {
    __shared__ float maxima[16];
    const int row_of_cta = threadIdx.x / args.threads, step = args.threads * 16;
    const int number = blockIdx.x * (blockDim.x / args.threads) + row_of_cta;
    const int first = threadIdx.x * 16 - row_of_cta * step;
    const int copies = EXPERTS && args.top_k && !args.input_scales ? args.top_k : 1;
    const bool permutes = EXPERTS || args.expanded_to_permuted;
    // EXPERTS: down reads nothing but h that is not there when h's rounding starts. So it may start, too, and copy
    // weights.
    if (EXPERTS && !args.top_k) launch_dependents();
    if (permutes) grid_dependency_wait();
    if (!EXPERTS || args.top_k) launch_dependents();
    const PermutedRow* places = args.expanded_to_permuted + static_cast<long long>(number) * copies;
    const bool one = permutes && copies == 1;  // destination, which may be missing
    const bool there = number < args.rows && (!one || places->permuted_row >= 0);
    const long long from = !one ? number : !there ? 0 : args.top_k ? number / args.top_k : places->permuted_row;
    const int blocks = (args.columns + 127) / 128, columns = EXPERTS ? blocks * 128 : args.columns;
    const bool once = columns <= step;
    float x[16] = {}, scale = 0.0f;
    if (there && (once || !args.input_scales)) {
        for (int column = first; column < args.columns; column += step) {
            load_x(args.x, args.x_dtype, from * args.columns + column, x);
            scale = max_magnitude(x, scale);
        }
    }
    if (args.input_scales) {
        if (!there) return;
        scale = args.input_scales[expert_id(args, number) - args.first_expert];
    } else {
        scale = scale_of(max_of_row(scale, maxima, row_of_cta, args.threads));
        if (!there) return;
    }
    const float inverse = inverse_of(scale);
    Destination to;
    if (!EXPERTS) {
        to = args.tiles ? Destination::of_tiles(args.out, blocks, *places)
                        : Destination::of_row(args.out, args.columns, permutes ? places->permuted_row : number);
    }
    for (int column = first; column < columns; column += step) {
        if (!once) {
#pragma unroll
            for (int i = 0; EXPERTS && i < 16; ++i) x[i] = 0.0f;
            if (!EXPERTS || column < args.columns) {
                load_x(args.x, args.x_dtype, from * args.columns + column, x);
            }
        }
        const uint4 codes = round_e4m3(x, scale, inverse);
        for (int i = 0; i < copies; ++i) {
            if (EXPERTS) {
                const PermutedRow place = places[i];
                if (place.permuted_row < 0) continue;
                to = Destination::of_tiles(args.out, blocks, place);
            }
            to.store(column, codes);
            if (column == 0) to.store_scale(0, scale);
        }
    }
    // The next kernel relies on this one having waited for the kernel ahead of it.
    if (!permutes) grid_dependency_wait();
}

}  // namespace polymoe

POLYMOE_KERNEL(quantize_permuted, QuantizePermutedArgs, (256), polymoe::quantize_permuted)
POLYMOE_KERNEL(quantize_rows, QuantizeRowsArgs, (512), polymoe::quantize_rows)
POLYMOE_KERNEL(quantize_whole_rows, QuantizeWholeRowsArgs, (512), quantize_whole_rows<false>)
POLYMOE_KERNEL(quantize_row_tiles, QuantizeWholeRowsArgs, (512), quantize_whole_rows<true>)
