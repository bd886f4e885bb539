// What stands before the first product of e4m3 rows: x in e4m3, with a scale for each 128 columns, in tiles.
//
// A tile is an item's rows by 128 columns: 128 bytes a row, swizzled, with room for a multiple of 8 rows, then a float32
// scale for each of them. A last tile of fewer columns is as large; what it has too many is zero.
#include "quantize.cuh"

namespace polymoe {

struct QuantizeArgs {
    const void* x;       // [tokens, columns]
    uint8_t* out;        // for each item, for each 128 columns, a tile
    const int4* places;  // [tokens, slots]: see make_place in rows.cu
    int columns, slots;  // columns: a multiple of 16
    int x_dtype;         // 0 bfloat16, 1 float16, 2 float32
};

// Grid: tokens by columns / 4096, 256 threads of 16 columns. A token is rounded once, for all experts that it goes to.
__device__ __forceinline__ void quantize(const QuantizeArgs& args) {
    const int token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 16, lane = threadIdx.x % 32;
    // x was complete before the kernel in front of this one let it start.
    float x[16] = {}, scale;
    if (column < args.columns) load_x(args.x, args.x_dtype, static_cast<long long>(token) * args.columns + column, x);
    const uint4 codes = round_to_e4m3(x, scale);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int blocks = (args.columns + 127) / 128;
    for (int first = 0; first < args.slots; first += 32) {  // a lane looks up a slot for all
        int4 place = make_int4(-1, 0, 0, 0);
        if (first + lane < args.slots) place = args.places[static_cast<long long>(token) * args.slots + first + lane];
        const int slots = min(32, args.slots - first);
        for (int slot = 0; slot < slots; ++slot) {
            if (__shfl_sync(0xFFFFFFFFu, place.x, slot) < 0) continue;
            const int item = __shfl_sync(0xFFFFFFFFu, place.y, slot), row = __shfl_sync(0xFFFFFFFFu, place.z, slot);
            const int padded = __shfl_sync(0xFFFFFFFFu, place.w, slot);
            if (column < blocks * 128) {
                uint8_t* out = args.out + static_cast<long long>(item) * blocks * 132;
                const int tile = column / 128 * padded + row, chunk = (column / 16 % 8) ^ (row % 8);
                *reinterpret_cast<uint4*>(out + tile * 128 + chunk * 16) = codes;
                if (column % 128 == 0) reinterpret_cast<float*>(out + blocks * padded * 128)[tile] = scale;
            }
        }
    }
}

}  // namespace polymoe

extern "C" __global__ void __launch_bounds__(256) quantize(const __grid_constant__ polymoe::QuantizeArgs args) {
    polymoe::quantize(args);
}
