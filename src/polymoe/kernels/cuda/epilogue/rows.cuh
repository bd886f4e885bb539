// How accumulators become h and y: scales, biases and the activation. The other files here write the results.
//
// Accumulators are as mma leaves them: lane 4g + t has rows g and g + 8 of a tile of 16 rows of weights, for rows 2t
// and 2t + 1 of each 8 rows of x. movmatrix_trans exchanges the two, so that a lane stores several neighbours of a row
// of x.
#pragma once
#include "activation.cuh"
#include "hooks.cuh"

namespace polymoe {

__device__ __forceinline__ float load_bias(const void* bias, int dtype, long long i) {
    if (dtype == kBfloat16) return bf16_to_f32(static_cast<const uint16_t*>(bias)[i]);
    if (dtype == kFloat16) return f16_to_f32(static_cast<const uint16_t*>(bias)[i]);
    return dtype == kFloat32 ? static_cast<const float*>(bias)[i] : 0.0f;
}

// An expert, and what its accumulators are multiplied by, with a gate those of gate and of up: the factor in the
// format's decoded scales, undone, and the expert's own scale.
template <class F, int PART>
struct ExpertScales {
    int expert;
    float low, high;

    __device__ __forceinline__ ExpertScales(const GemmArgs& args, int expert) : expert(expert) {
        low = of(args.expert_scale, expert), high = PART == kGateUp ? of(args.up_expert_scale, expert) : low;
    }

    static __device__ __forceinline__ float of(const float* scales, int expert) {
        return scales ? F::kAccScale * scales[expert] : F::kAccScale;
    }
};

// What the sums of a work tile's row are multiplied by, where router weights multiply the input. Beyond the last row,
// that row's.
__device__ __forceinline__ float input_weight(const GemmArgs& args, WorkTile tile, int row) {
    return args.router_weights[args.permuted_to_expanded[tile.row + min(row, tile.rows - 1)]];
}

// Which of a tile's 16 rows of weights are rows g and g + 8 of the MMA: these, where a row has less than a byte for a
// column; or two neighbours of four, so that a lane has all four after movmatrix_trans. With a gate, rows g of gate and
// of up.
enum RowOrder { kHalves, kNeighbours };

// A lane's two rows of a tile of 16 rows of weights: which columns of h or y they are, and their scales and biases.
template <int PART, RowOrder ORDER>
struct WeightRows {
    static constexpr int kColumns = PART == kGateUp ? 8 : 16;  // of h or y
    int expert, first, second;
    float first_scale, second_scale, first_bias, second_bias;

    __device__ __forceinline__ WeightRows(const GemmArgs& args, int expert, int tile16, float first_scale = 1.0f,
                                          float second_scale = 1.0f)
        : expert(expert), first_scale(first_scale), second_scale(second_scale) {
        const int g = threadIdx.x % 32 / 4;
        constexpr bool kWhole = PART == kGateUp || ORDER == kHalves;
        constexpr int kStep = PART == kGateUp ? 0 : kWhole ? 8 : 2;  // to the second
        first = tile16 * kColumns + (kWhole ? g : g / 2 * 4 + g % 2), second = first + kStep;
        const long long bias = static_cast<long long>(expert) * width(args) + first;
        first_bias = load_bias(args.bias, args.bias_dtype, bias);
        second_bias = load_bias(PART == kGateUp ? args.up_bias : args.bias, args.bias_dtype, bias + kStep);
    }

    // Columns of h or y.
    static __device__ __forceinline__ int width(const GemmArgs& args) { return PART == kGateUp ? args.n / 2 : args.n; }

    // Sums of row `row` of h or y to what is stored: with a gate, h is in `low`. `weight`: of the input.
    template <Evaluation HOW>
    __device__ __forceinline__ void finish(const GemmArgs& args, int row, float& low, float& high,
                                           float weight = 1.0f) const {
        low = fmaf(low, first_scale * weight, first_bias), high = fmaf(high, second_scale * weight, second_bias);
        const SumsAt at = {expert, row, first, second};
        if constexpr (PART == kDown) {
            after_down(args, at, low, high);
        } else {
            before_activation(args, at, low, high);
            activate<PART, HOW>(args, low, high);
        }
    }
};

}  // namespace polymoe
