// Rows of x by token, gathered by all lanes of the producer warps.
#pragma once
#include "../pipeline.cuh"
#include "../ptx/async_copy.cuh"

namespace polymoe {

constexpr int kProducerWarps = 4;

// Arrivals of the producer warps at a full stage: of one lane each for weights, and of each lane for its copies of x,
// which arrive by themselves.
__device__ __forceinline__ constexpr int full_arrivals(bool gathers) { return kProducerWarps * (gathers ? 33 : 1); }

// Rows of x of a work tile, as the lanes of all producer warps copy them, 16 bytes each: eight lanes per row, sixteen
// rows at a time.
template <int BLOCK_M>
struct GatheredRows {
    static constexpr int kAtOnce = kProducerWarps * 4, kTimes = (BLOCK_M + kAtOnce - 1) / kAtOnce;
    uint32_t pieces[kTimes];  // of 16 bytes, from the first of x to this lane's first of the row
    int rows;                 // that this lane copies

    __device__ __forceinline__ void begin(const GemmArgs& args, WorkTile tile, int producer) {
        const int lane = threadIdx.x % 32, first = producer * 4 + lane / 8;
        rows = tile.rows - first;
#pragma unroll
        for (int i = 0; i < kTimes; ++i) {
            if (i * kAtOnce < rows) {
                const int expanded = args.permuted_to_expanded[tile.row + first + i * kAtOnce];
                pieces[i] = static_cast<uint32_t>(expanded / args.top_k) * (args.k / 8) + lane % 8;
            }
        }
    }

    // The block number `block` of 64 columns, to `smem`.
    __device__ __forceinline__ void copy(const GemmArgs& args, uint32_t smem, int block, int producer) const {
        const int lane = threadIdx.x % 32, first = producer * 4 + lane / 8;
        if (block * 8 + lane % 8 >= args.k / 8) return;
        const uint4* x = reinterpret_cast<const uint4*>(args.x) + block * 8;
        smem += first * 128 + ((lane % 8) ^ (first % 8)) * 16;
#pragma unroll
        for (int i = 0; i < kTimes; ++i) {
            if (i * kAtOnce < rows) cp_async_16(smem + i * (kAtOnce * 128), x + pieces[i]);
        }
    }
};

}  // namespace polymoe
