// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w4a16_wgmma.cuh"

// clang-format off
// Last arguments: the part, consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns
// in a stage, bytes of a stage, block_m, and smaller widths for fewer rows of x.
POLYMOE_GEMM_KERNEL(w8a16_wgmma_gate_up_m32, 640, w4a16_wgmma_gemm<Mxfp8, kGateUp, 4, 2, 2, 75776, 32, 16>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_gate_up_m64, 640, w4a16_wgmma_gemm<Mxfp8, kGateUp, 4, 1, 2, 50176, 64, 32, 48>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_gate_up_m128, 384, w4a16_wgmma_gemm<Mxfp8, kGateUp, 2, 2, 2, 66560, 128, 48, 96>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_gate_up_m256, 384, w4a16_wgmma_gemm<Mxfp8, kGateUp, 2, 1, 1, 41984, 256, 96, 160, 192, 224>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_up_m32, 640, w4a16_wgmma_gemm<Mxfp8, kUp, 4, 2, 2, 75776, 32, 16>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_up_m64, 640, w4a16_wgmma_gemm<Mxfp8, kUp, 4, 1, 2, 50176, 64, 32, 48>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_up_m128, 384, w4a16_wgmma_gemm<Mxfp8, kUp, 2, 2, 2, 66560, 128, 48, 96>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_up_m256, 384, w4a16_wgmma_gemm<Mxfp8, kUp, 2, 1, 1, 41984, 256, 96, 160, 192, 224>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_down_m32, 640, w4a16_wgmma_gemm<Mxfp8, kDown, 4, 2, 2, 75776, 32, 16>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_down_m64, 640, w4a16_wgmma_gemm<Mxfp8, kDown, 4, 1, 2, 50176, 64, 32, 48>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_down_m128, 384, w4a16_wgmma_gemm<Mxfp8, kDown, 2, 2, 2, 66560, 128, 48, 96>)
POLYMOE_GEMM_KERNEL(w8a16_wgmma_down_m256, 384, w4a16_wgmma_gemm<Mxfp8, kDown, 2, 1, 1, 41984, 256, 96, 160, 192, 224>)
