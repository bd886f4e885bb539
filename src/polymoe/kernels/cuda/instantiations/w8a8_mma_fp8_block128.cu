// Generated from sizes.py by scripts/build-kernels; do not edit.
#include "../gemm/w8a8_mma.cuh"

// clang-format off
// Last arguments: what shares a scale, the part, warps, bytes of a stage, and whether sums are ordered.
POLYMOE_ROUNDING_KERNEL(w8a8_mma_gate_up_m8, 512, w8a8_mma_gemm<kBlock128, kGateUp, 16, 65536>)
POLYMOE_ROUNDING_KERNEL(w8a8_mma_down_m8, 512, w8a8_mma_gemm<kBlock128, kDown, 16, 65536>)
