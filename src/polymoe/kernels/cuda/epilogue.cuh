// Epilogues: biases, activations, and accumulators to h or y in bfloat16.
//
// Accumulators are as mma leaves them: lane 4g + t has rows g and g + 8 of a tile of 16 rows of weights, for rows 2t
// and 2t + 1 of each 8 rows of x. movmatrix_trans exchanges the two, so that a lane stores several neighbours of a row
// of x.
#pragma once
#include "gemm/args.cuh"
#include "pipeline.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"

namespace polymoe {

__device__ __forceinline__ float load_bias(const void* bias, int dtype, long long i) {
    if (dtype == kBfloat16) return bf16_to_f32(static_cast<const uint16_t*>(bias)[i]);
    if (dtype == kFloat16) return f16_to_f32(static_cast<const uint16_t*>(bias)[i]);
    return dtype == kFloat32 ? static_cast<const float*>(bias)[i] : 0.0f;
}

// What an expert's accumulators are multiplied by: the factor in the format's decoded scales, undone, and the expert's
// own scale.
template <class F>
__device__ __forceinline__ float acc_scale(const float* expert_scale, int expert) {
    return expert_scale ? F::kAccScale * expert_scale[expert] : F::kAccScale;
}

// SwiGLU with fast division and exponential: the last bits may differ.
__device__ __forceinline__ float fast_swiglu(const GemmArgs& args, float gate, float up) {
    const float limit = args.limit > 0 ? args.limit : __int_as_float(0x7F800000),
                power = args.alpha * -1.4426950408889634f;
    gate = min_nan(gate, limit), up = max_nan(min_nan(up, limit), -limit);
    return fast_divide(gate, 1.0f + exp2_approx(power * gate)) * (up + args.beta);
}

__device__ __forceinline__ float gated_activation(const GemmArgs& args, float gate, float up) {
    if (args.activation == kSwiglu) {
        if (args.limit > 0) {
            gate = fminf(gate, args.limit);
            up = fminf(fmaxf(up, -args.limit), args.limit);
        }
        return gate / (1.0f + __expf(-args.alpha * gate)) * (up + args.beta);
    }
    if (args.activation == kGelu) return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    const float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + __expf(-inner)) * up;
}

// Which of a tile's 16 rows of weights is row g of the MMA's first 8, or of its last 8, where weights are whole bytes.
// With a gate, gate and up are interleaved; otherwise a lane has four neighbours after movmatrix_trans.
template <int PART>
__device__ __forceinline__ int tile_row(int g, int half) {
    return PART == kGateUp ? g : g / 2 * 4 + half * 2 + g % 2;
}

// ---- 4-bit weights: a tile of 16 rows of weights, and what becomes of it

struct TileEpilogue {
    const GemmArgs& args;
    WorkTile tile;
    float low_scale, high_scale, low_bias, high_bias;  // of rows g and g + 8

    // Rows g and g + 8 for rows m0 + 2t and m0 + 2t + 1 of x.
    template <int PART>
    __device__ __forceinline__ void scale(const float* c, int m0, float (&low)[2], float (&high)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float weight = 1.0f;
            if (PART != kDown && args.router_weights) {
                const int row = min(m0 + static_cast<int>(threadIdx.x) % 4 * 2 + i, tile.rows - 1);
                weight = args.router_weights[args.permuted_to_expanded[tile.row + row]];
            }
            low[i] = c[i] * (low_scale * weight) + low_bias, high[i] = c[2 + i] * (high_scale * weight) + high_bias;
        }
    }
};

// Writes the tile number `tile16` of 16 rows of weights by all rows of the work tile: h to permuted tiles, y by
// permuted row. A lane stores 4 bytes: rows 2t and 2t + 1 of weights for row g of x.
template <int PART, int BLOCK_M>
__device__ __forceinline__ void store_tile(const TileEpilogue& epilogue, const float* acc, int tile16) {
    const GemmArgs& args = epilogue.args;
    const WorkTile tile = epilogue.tile;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int column = (PART == kGateUp ? tile16 * 8 : tile16 * 16) + 2 * t;
    float low[2], high[2];
    if (PART == kDown) {
        uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(tile.row + g) * args.n + column;
        const long long step = 8LL * args.n;
#pragma unroll
        for (int m0 = 0; m0 < BLOCK_M; m0 += 8) {
            if (m0 >= tile.rows) break;
            epilogue.scale<PART>(acc + m0 / 2, m0, low, high);
            const uint32_t first = movmatrix_trans(pack_bf16x2(low[0], low[1]));
            const uint32_t second = movmatrix_trans(pack_bf16x2(high[0], high[1]));
            if (m0 + g < tile.rows) {
                *reinterpret_cast<uint32_t*>(out) = first;
                *reinterpret_cast<uint32_t*>(out + 8) = second;
            }
            out += step;
        }
        return;
    }
    const int width = PART == kGateUp ? args.n / 2 : args.n;
    uint16_t* out =
        static_cast<uint16_t*>(args.out) + static_cast<long long>(tile.padded_row) * ((width + 63) / 64 * 64);
    uint16_t* first_out = out + permuted_tile_offset(g, column, tile.rows);  // the next 8 rows: 512 elements further on
    if (PART == kUp) {
        uint16_t* second_out = out + permuted_tile_offset(g, column + 8, tile.rows);
#pragma unroll
        for (int m0 = 0; m0 < BLOCK_M; m0 += 8) {
            if (m0 >= tile.rows) break;
            epilogue.scale<PART>(acc + m0 / 2, m0, low, high);
#pragma unroll
            for (int i = 0; i < 2; ++i) low[i] = max_nan(low[i], 0.0f), high[i] = max_nan(high[i], 0.0f);
            const uint32_t first = movmatrix_trans(pack_bf16x2(low[0] * low[0], low[1] * low[1]));
            const uint32_t second = movmatrix_trans(pack_bf16x2(high[0] * high[0], high[1] * high[1]));
            if (m0 + g < tile.rows) {
                *reinterpret_cast<uint32_t*>(first_out + m0 * 64) = first;
                *reinterpret_cast<uint32_t*>(second_out + m0 * 64) = second;
            }
        }
    } else if (args.activation == kSwiglu) {
#pragma unroll
        for (int m0 = 0; m0 < BLOCK_M; m0 += 8) {
            if (m0 >= tile.rows) break;
            epilogue.scale<PART>(acc + m0 / 2, m0, low, high);
            const uint32_t v =
                movmatrix_trans(pack_bf16x2(fast_swiglu(args, low[0], high[0]), fast_swiglu(args, low[1], high[1])));
            if (m0 + g < tile.rows) *reinterpret_cast<uint32_t*>(first_out + m0 * 64) = v;
        }
    } else {
#pragma unroll
        for (int m0 = 0; m0 < BLOCK_M; m0 += 8) {
            if (m0 >= tile.rows) break;
            epilogue.scale<PART>(acc + m0 / 2, m0, low, high);
            const uint32_t v = movmatrix_trans(
                pack_bf16x2(gated_activation(args, low[0], high[0]), gated_activation(args, low[1], high[1])));
            if (m0 + g < tile.rows) *reinterpret_cast<uint32_t*>(first_out + m0 * 64) = v;
        }
    }
}

// ---- E4M3 weights

// Writes y for the block number `n_block` of 64 rows of weights, by permuted row. A lane stores four neighbours of a
// row; TOGETHER times eight rows are in flight at once.
template <int BLOCK_M, int TOGETHER = 1>
__device__ __forceinline__ void store_y(const GemmArgs& args, const float (&acc)[BLOCK_M / 2], WorkTile tile,
                                        int n_block) {
    static_assert(BLOCK_M / 8 % TOGETHER == 0);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = n_block * 64 + threadIdx.x / 32 % 4 * 16;
    const long long bias = static_cast<long long>(tile.expert) * args.n + row;
    const float low = load_bias(args.bias, args.bias_dtype, bias + tile_row<kDown>(g, 0));
    const float high = load_bias(args.bias, args.bias_dtype, bias + tile_row<kDown>(g, 1));
    uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<long long>(tile.row + g) * args.n + row + 4 * t;
    const long long step = 8LL * args.n;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; n += TOGETHER) {
        if (n * 8 >= tile.rows) break;
        uint2 y[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const float* c = &acc[4 * (n + i)];
            y[i].x = movmatrix_trans(pack_bf16x2(c[0] + low, c[1] + low));
            y[i].y = movmatrix_trans(pack_bf16x2(c[2] + high, c[3] + high));
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if ((n + i) * 8 + g < tile.rows) *reinterpret_cast<uint2*>(out + i * step) = y[i];
        }
        out += TOGETHER * step;
    }
}

}  // namespace polymoe
