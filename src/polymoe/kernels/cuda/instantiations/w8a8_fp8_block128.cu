// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w8a8.cuh"

// clang-format off
// Last arguments: what shares a scale, the part, consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns
// in a stage, bytes of a stage, block_m, and smaller widths for fewer rows of x.
POLYMOE_GEMM_KERNEL(w8a8_gate_up_m160, 384, w8a8_gemm<kBlock128, kGateUp, 2, 2, 2, 54272, 160, 32, 64, 80, 96, 112, 128>)
POLYMOE_GEMM_KERNEL(w8a8_down_m160, 384, w8a8_gemm<kBlock128, kDown, 2, 2, 2, 54272, 160, 32, 64, 80, 96, 112, 128>)
POLYMOE_GEMM_KERNEL(w8a8_gate_up_tiles_m160, 384, w8a8_gemm<kBlock128, kGateUpTiles, 2, 2, 2, 54272, 160, 32, 64, 80, 96, 112, 128>)
