// Stores of 8x8 matrices of 16-bit elements to shared memory, which lanes hold as ldmatrix.cuh says.
#pragma once
#include <cstdint>

namespace polymoe {

// Four matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace polymoe
