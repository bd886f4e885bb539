// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w4a16_mma.cuh"

// clang-format off
// Last arguments: the part, rows of x in multiples of 8, block_n, teams of warps, bytes of a stage, and whether sums are
// ordered.
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_ordered_gate_up_m8, 576, w4a16_mma_gemm<Int4<128>, kGateUp, 1, 64, 4, 16896, true>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_ordered_up_m8, 576, w4a16_mma_gemm<Int4<128>, kUp, 1, 64, 4, 16896, true>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_ordered_down_m8_k256, 576, w4a16_mma_gemm<Int4<128>, kDown, 1, 128, 4, 16896, true>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_ordered_down_m8_k512, 576, w4a16_mma_gemm<Int4<128>, kDown, 1, 64, 8, 16896, true>)
POLYMOE_FEW_ROWS_KERNEL(w4a16_mma_ordered_down_m8, 576, w4a16_mma_gemm<Int4<128>, kDown, 1, 64, 4, 16896, true>)
