// E4M3 weights and E4M3 rows of x, both from shared memory: the main loop of a consumer warpgroup.
//
// M of the MMA runs over rows of x, and N over rows of weights: of 64 rows of x a thread has sums of two, so that it
// needs few scales, and neither operand passes through registers. The tensor cores add up 128 columns; such sums are
// multiplied by scales and accumulated in float32.
#pragma once
#include "../epilogue/row_sums.cuh"
#include "../ptx/compiler.cuh"
#include "../ptx/wgmma_e4m3.cuh"

namespace polymoe {

// All of K for the warpgroup's 128 rows of weights and the work tile's rows, one chain of MMAs for each 64 rows after
// the other. A warpgroup accumulates while the other's MMAs run.
//
// Mainloop: the class that derives from this one. It waits for a stage (`wait`), says what a chain's sums are
// multiplied by (`load_scales`), and gives the stage back (`release`). S: where weights, x and the rows'
// scales lie in a stage.
template <class Mainloop, class S, int BLOCK_M>
struct SharedMainloop {
    static constexpr int kMmaRows = 64, kMmaColumns = 128;  // rows of x and of weights
    RowSums<BLOCK_M>& acc;
    Pipeline& pipeline;
    uint32_t weights, row_scales;  // in a stage

    __device__ __forceinline__ SharedMainloop(RowSums<BLOCK_M>& acc, Pipeline& pipeline)
        : acc(acc), pipeline(pipeline) {
        const int warp = threadIdx.x / 32, warpgroup = warp / 4, g = threadIdx.x % 32 / 4;
        weights = warp_uniform((S::kWeights + warpgroup * kMmaColumns * kE4m3BlockK) / 16);
        row_scales = opaque(S::kRowScales + (warp % 4 * 16 + g) * 4);
    }

    template <int ROWS>
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < ROWS / kMmaRows; ++m) {
#pragma unroll
            for (int i = 0; i < kMmaColumns / 2; ++i) acc[m][i] = 0.0f;
        }
    }

    // Stages of so many columns.
    template <int ROWS, int COLUMNS>
    __device__ __forceinline__ void add(int stages) {
        constexpr int kBlocks = ROWS / kMmaRows;
        Mainloop& mainloop = static_cast<Mainloop&>(*this);
        for (int left = stages; left > 0; --left) {
            const uint32_t stage = mainloop.wait();
#pragma unroll
            for (int m = 0; m < kBlocks; ++m) {
                float sum[kMmaColumns / 2];
                wgmma_fence();
#pragma unroll
                for (int part = 0; part < COLUMNS / 32; ++part) {
                    const uint32_t units = smem_desc_units(stage) + part * 2;
                    const uint64_t a = make_smem_desc_units(units + (S::kX + m * kMmaRows * 128) / 16);
                    const uint64_t b = make_smem_desc_units(units + weights);
                    if (part == 0) {
                        WgmmaE4m3<kMmaColumns>::set(sum, a, b);
                    } else {
                        WgmmaE4m3<kMmaColumns>::add(sum, a, b);
                    }
                }
                wgmma_commit();
                float scales[2][2];  // of rows g and g + 8, for even and odd 8 rows of weights
                mainloop.load_scales(stage, m, scales);
                wgmma_wait<0>();
                if (m == kBlocks - 1) mainloop.release();
#pragma unroll
                for (int i = 0; i < kMmaColumns / 2; ++i) {
                    materialize(sum[i]);
                    acc[m][i] = fmaf(sum[i], scales[i / 2 % 2][i / 4 % 2], acc[m][i]);
                }
            }
            pipeline.advance();
        }
    }

    // Of row g or g + 8 of a block of 64 rows of x.
    __device__ __forceinline__ float row_scale(uint32_t stage, int m, int i) const {
        return __uint_as_float(ld_shared(stage + row_scales + (m * kMmaRows + i * 8) * 4));
    }
};

}  // namespace polymoe
