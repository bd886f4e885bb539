// What all grouped GEMMs take. Swap A/B: the weights are the MMA's left operand, so its M runs over rows of weights,
// the layer's N, and its N over rows of x, the layer's M. m, n and k are the layer's everywhere else.
#pragma once
#include <cstdint>

#include "../ptx/compiler.cuh"

namespace polymoe {

// Gate, up and the activation; up and relu squared; down; the first where x comes in permuted tiles (w8a8).
enum Part { kGateUp, kUp, kDown, kGateUpTiles };
enum BiasDtype { kNone, kBfloat16, kFloat16, kFloat32 };
enum ActivationKind { kSwiglu, kGelu, kGeluTanh };

// Up to block_m of the rows that chose one expert. In permuted tiles an expert's rows are padded to a multiple of 8.
struct __align__(16) WorkTile {
    int expert;
    int row;         // the first of its permuted rows
    int rows;        // how many
    int padded_row;  // the first, where rows are padded
};

// The same work tile, which all lanes of the warp hold.
__device__ __forceinline__ WorkTile uniform_tile(WorkTile tile) {
    tile.expert = warp_uniform(tile.expert), tile.row = warp_uniform(tile.row);
    tile.rows = warp_uniform(tile.rows), tile.padded_row = warp_uniform(tile.padded_row);
    return tile;
}

// The work of one launch. A layer has one for each: gate and up, down; the same for narrow work tiles.
struct __align__(16) TileList {
    int work_tiles;  // in use
    int ctas;        // CTAs that take part: those of smaller numbers
    int next;        // the tile that nobody has taken yet
    int unused;
};

constexpr int kLists = 2;  // from a list to that of the second launch

struct GemmArgs {
    const uint8_t* codes;          // [E, bytes]
    const uint8_t* scales;         // [E, bytes], or null
    const void* bias;              // [E, n], or with a gate the gate's [E, F]
    const void* up_bias;           // [E, F]
    const float* expert_scale;     // [E]: multiplies all weights, with a gate the gate's; or null
    const float* up_expert_scale;  // [E], or null
    const uint16_t* x;             // rows of k elements, or permuted tiles
    void* out;        // gate_up, up: h by permuted row; down: y, float32 by expanded row or bfloat16 by permuted row
    TileList* tiles;  // how many work tiles are in use, and who takes them
    const WorkTile* work_tiles;             // by expert
    const int* permuted_to_expanded;        // expanded row of each permuted row
    const float* router_weights;            // [expanded rows]: multiply the input; or null
    long long codes_stride, scales_stride;  // bytes of an expert
    int n, k;
    int top_k;                       // where x is by token; 0 where it is by permuted row
    int stages, x_buffers, block_m;  // of the pipeline; block_m: rows of x that a buffer has room for (w4a16_mma)
    int activation, bias_dtype;
    float alpha, beta, limit;
    int second_launch;  // of two for the same matrices: that of the narrow work tiles
};

}  // namespace polymoe
