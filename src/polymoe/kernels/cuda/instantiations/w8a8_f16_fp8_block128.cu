// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w8a8_f16.cuh"

// clang-format off
// Last arguments: what shares a scale, the part, consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns
// in a stage, bytes of a stage, block_m, and smaller widths for fewer rows of x.
POLYMOE_GEMM_KERNEL(w8a8_f16_gate_up_m32, 384, w8a8_f16_gemm<kBlock128, kGateUp, 2, 2, 2, 41984, 32, 16>)
POLYMOE_GEMM_KERNEL(w8a8_f16_gate_up_m64, 384, w8a8_f16_gemm<kBlock128, kGateUp, 2, 2, 2, 50176, 64, 32, 48>)
POLYMOE_GEMM_KERNEL(w8a8_f16_gate_up_m96, 384, w8a8_f16_gemm<kBlock128, kGateUp, 2, 2, 2, 58368, 96, 48, 64, 80>)
POLYMOE_GEMM_KERNEL(w8a8_f16_down_m32, 384, w8a8_f16_gemm<kBlock128, kDown, 2, 2, 2, 41984, 32, 16>)
POLYMOE_GEMM_KERNEL(w8a8_f16_down_m64, 384, w8a8_f16_gemm<kBlock128, kDown, 2, 2, 2, 50176, 64, 32, 48>)
POLYMOE_GEMM_KERNEL(w8a8_f16_down_m96, 384, w8a8_f16_gemm<kBlock128, kDown, 2, 2, 2, 58368, 96, 48, 64, 80>)
