// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../dequant/fp4_cvt.cuh"
#include "../gemm/w4a16_mma.cuh"

// clang-format off
// Last arguments: the part, rows of x in multiples of 8, block_n, teams of warps, bytes of a stage, and whether sums are
// ordered.
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_gate_up_m8_n64, 576, w4a16_mma_gemm<Mxfp4Cvt, kGateUp, 1, 64, 1, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_gate_up_m16_n64, 576, w4a16_mma_gemm<Mxfp4Cvt, kGateUp, 2, 64, 1, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_up_m8_n64, 576, w4a16_mma_gemm<Mxfp4Cvt, kUp, 1, 64, 1, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_up_m16_n64, 576, w4a16_mma_gemm<Mxfp4Cvt, kUp, 2, 64, 1, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_down_m8_k256, 576, w4a16_mma_gemm<Mxfp4Cvt, kDown, 1, 128, 4, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_down_m8_k512, 576, w4a16_mma_gemm<Mxfp4Cvt, kDown, 1, 64, 8, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_down_m8_n64, 576, w4a16_mma_gemm<Mxfp4Cvt, kDown, 1, 64, 1, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_down_m16_k256, 576, w4a16_mma_gemm<Mxfp4Cvt, kDown, 2, 128, 4, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_down_m16_k512, 576, w4a16_mma_gemm<Mxfp4Cvt, kDown, 2, 64, 8, 17408>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_down_m16_n64, 576, w4a16_mma_gemm<Mxfp4Cvt, kDown, 2, 64, 1, 17408>)
