// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w4a16_mma_tiled.cuh"

// clang-format off
// Last arguments: the part, consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns
// in a stage, bytes of a stage, block_m, and smaller widths for fewer rows of x.
POLYMOE_GEMM_KERNEL(w8a16_mma_tiled_gate_up_m96, 384, w4a16_mma_tiled_gemm<Mxfp8, kGateUp, 2, 2, 1, 29696, 96, 16, 32, 48, 64, 80>)
POLYMOE_GEMM_KERNEL(w8a16_mma_tiled_up_m96, 384, w4a16_mma_tiled_gemm<Mxfp8, kUp, 2, 2, 1, 29696, 96, 16, 32, 48, 64, 80>)
POLYMOE_GEMM_KERNEL(w8a16_mma_tiled_down_m96, 384, w4a16_mma_tiled_gemm<Mxfp8, kDown, 2, 2, 1, 29696, 96, 16, 32, 48, 64, 80>)
