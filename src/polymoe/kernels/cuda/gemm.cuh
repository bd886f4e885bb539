// What the decode and the prefill products share: their arguments, biases, activations.
#pragma once
#include "ptx.cuh"

namespace polymoe {

enum Matrix { kGated, kPlain, kDown };
enum Dtype { kNone, kBfloat16, kFloat16, kFloat32 };

struct GemmArgs {
    const uint8_t* codes;   // [E, N * K / 2]
    const uint8_t* scales;  // [E, ...]
    const void* bias;       // [E, N], of the gate where there is one
    const void* up_bias;    // [E, F]
    const float* scale;     // [E]: all weights times this, those of the gate where there is one; or null
    const float* up_scale;  // [E], or null
    const uint16_t* x;      // rows of K
    void* out;              // up: bfloat16 [rows, F] in expert order; down: float32 [routed rows, H]
    const int* count;       // items in use
    const int4* items;      // expert, first row, rows, first row where each item's rows are filled up to 8
    const int* order;       // routed row of each row in expert order
    const float* weights;   // [routed rows], or null: multiplies the input
    long long codes_expert, scales_expert;
    int rows, columns;      // N, K
    int slots;              // A where x is in token order, 0 where it is in expert order
    int stages, buffers, item_rows;  // of the rings of weights and of x; room for rows of x in an item (decode)
    int activation, bias_dtype;
    float alpha, beta, limit;
};

// Where weights are whole bytes: which of a tile's 16 rows the products' row g (of the first 8, and of the last) is. With a
// gate, gate and up take turns; otherwise a thread shall have four neighbours after `transposed`.
template <int MATRIX>
__device__ __forceinline__ int row_of(int g, int half) {
    return MATRIX == kGated ? g : g / 2 * 4 + half * 2 + g % 2;
}

__device__ __forceinline__ float load_bias(const void* bias, int dtype, long long at) {
    if (dtype == kBfloat16) return from_bfloat16(static_cast<const uint16_t*>(bias)[at]);
    if (dtype == kFloat16) return from_float16(static_cast<const uint16_t*>(bias)[at]);
    return dtype == kFloat32 ? static_cast<const float*>(bias)[at] : 0.0f;
}

// What an expert's sums are multiplied by: the format's own factor undone, and the expert's scale.
template <class F>
__device__ __forceinline__ float unscale(const float* scale, int expert) {
    return scale ? F::kUnscale * scale[expert] : F::kUnscale;
}

// SwiGLU, quick: the last bits may differ.
__device__ __forceinline__ float swiglu(const GemmArgs& args, float gate, float up) {
    const float limit = args.limit > 0 ? args.limit : __int_as_float(0x7F800000), power = args.alpha * -1.4426950408889634f;
    gate = lesser(gate, limit), up = greater(lesser(up, limit), -limit);
    return quotient(gate, 1.0f + power_of_2(power * gate)) * (up + args.beta);
}

__device__ __forceinline__ float gated(const GemmArgs& args, float gate, float up) {
    if (args.activation == 0) {  // SwiGLU
        if (args.limit > 0) {
            gate = fminf(gate, args.limit);
            up = fminf(fmaxf(up, -args.limit), args.limit);
        }
        return gate / (1.0f + __expf(-args.alpha * gate)) * (up + args.beta);
    }
    if (args.activation == 1) return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    const float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + __expf(-inner)) * up;
}

}  // namespace polymoe
