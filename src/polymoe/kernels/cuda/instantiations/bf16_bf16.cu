// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/bf16.cuh"

// clang-format off
// Last arguments: the part, consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns
// in a stage, bytes of a stage, block_m, and smaller widths for fewer rows of x.
POLYMOE_GEMM_KERNEL(bf16_gate_up_m32, 384, bf16_gemm<kGateUp, 2, 1, 2, 40960, 32, 8, 16, 24>)
POLYMOE_GEMM_KERNEL(bf16_gate_up_m64, 384, bf16_gemm<kGateUp, 2, 1, 2, 49152, 64, 16, 32, 48>)
POLYMOE_GEMM_KERNEL(bf16_gate_up_m128, 384, bf16_gemm<kGateUp, 2, 2, 1, 49152, 128, 32, 64, 96>)
POLYMOE_GEMM_KERNEL(bf16_gate_up_m160, 384, bf16_gemm<kGateUp, 2, 2, 1, 53248, 160, 32, 64, 96, 128>)
POLYMOE_GEMM_KERNEL(bf16_gate_up_m320, 384, bf16_gemm<kGateUp, 2, 1, 1, 57344, 320, 64, 128, 192, 256, 272, 288>)
POLYMOE_GEMM_KERNEL(bf16_up_m32, 384, bf16_gemm<kUp, 2, 1, 2, 40960, 32, 8, 16, 24>)
POLYMOE_GEMM_KERNEL(bf16_up_m64, 384, bf16_gemm<kUp, 2, 1, 2, 49152, 64, 16, 32, 48>)
POLYMOE_GEMM_KERNEL(bf16_up_m128, 384, bf16_gemm<kUp, 2, 2, 1, 49152, 128, 32, 64, 96>)
POLYMOE_GEMM_KERNEL(bf16_up_m160, 384, bf16_gemm<kUp, 2, 2, 1, 53248, 160, 32, 64, 96, 128>)
POLYMOE_GEMM_KERNEL(bf16_up_m320, 384, bf16_gemm<kUp, 2, 1, 1, 57344, 320, 64, 128, 192, 256, 272, 288>)
POLYMOE_GEMM_KERNEL(bf16_down_m32, 384, bf16_gemm<kDown, 2, 1, 2, 40960, 32, 8, 16, 24>)
POLYMOE_GEMM_KERNEL(bf16_down_m64, 384, bf16_gemm<kDown, 2, 1, 2, 49152, 64, 16, 32, 48>)
POLYMOE_GEMM_KERNEL(bf16_down_m128, 384, bf16_gemm<kDown, 2, 2, 1, 49152, 128, 32, 64, 96>)
POLYMOE_GEMM_KERNEL(bf16_down_m160, 384, bf16_gemm<kDown, 2, 2, 1, 53248, 160, 32, 64, 96, 128>)
POLYMOE_GEMM_KERNEL(bf16_down_m320, 384, bf16_gemm<kDown, 2, 1, 1, 57344, 320, 64, 128, 192, 256, 272, 288>)
