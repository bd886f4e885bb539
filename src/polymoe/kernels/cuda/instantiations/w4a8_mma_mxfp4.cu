// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w4a8_mma.cuh"

// clang-format off
// Last arguments: the format, the part, rows of x in multiples of 8, block_n, teams of warps, bytes of a stage.
POLYMOE_ROUNDING_KERNEL(w4a8_mma_gate_up_m8_n64, 576, w4a8_mma_gemm<Mxfp4ToE4m3, kGateUp, 1, 64, 1, 17408>)
POLYMOE_ROUNDING_KERNEL(w4a8_mma_gate_up_m16_n64, 576, w4a8_mma_gemm<Mxfp4ToE4m3, kGateUp, 2, 64, 1, 17408>)
POLYMOE_ROUNDING_KERNEL(w4a8_mma_down_m8_n64, 576, w4a8_mma_gemm<Mxfp4ToE4m3, kDown, 1, 64, 1, 17408>)
POLYMOE_ROUNDING_KERNEL(w4a8_mma_down_m16_n64, 576, w4a8_mma_gemm<Mxfp4ToE4m3, kDown, 2, 64, 1, 17408>)
