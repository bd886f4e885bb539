// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w4a8_rows.cuh"

// clang-format off
// Last arguments: the part, consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns
// in a stage, bytes of a stage, block_m, and smaller widths for fewer rows of x.
POLYMOE_GEMM_KERNEL(w4a8_rows_gate_up_m32, 640, w4a8_rows_gemm<Int4ToE4m3<true>, kGateUp, 4, 1, 2, 22528, 32, 8, 16, 24>)
POLYMOE_GEMM_KERNEL(w4a8_rows_gate_up_m64, 640, w4a8_rows_gemm<Int4ToE4m3<true>, kGateUp, 4, 1, 2, 26624, 64, 32, 48>)
POLYMOE_GEMM_KERNEL(w4a8_rows_gate_up_m128, 384, w4a8_rows_gemm<Int4ToE4m3<true>, kGateUp, 2, 2, 2, 34816, 128, 32, 64, 96, 112>)
POLYMOE_GEMM_KERNEL(w4a8_rows_down_m32, 640, w4a8_rows_gemm<Int4ToE4m3<true>, kDown, 4, 1, 2, 22528, 32, 8, 16, 24>)
POLYMOE_GEMM_KERNEL(w4a8_rows_down_m64, 640, w4a8_rows_gemm<Int4ToE4m3<true>, kDown, 4, 1, 2, 26624, 64, 32, 48>)
POLYMOE_GEMM_KERNEL(w4a8_rows_down_m128, 384, w4a8_rows_gemm<Int4ToE4m3<true>, kDown, 2, 2, 2, 34816, 128, 32, 64, 96, 112>)
