// Stands in for the kernels' ptx/word_copy.cuh.
#pragma once
#include "async_copy.cuh"

namespace polymoe {

inline void cp_async_4(uint32_t smem, const void* global) { cp_async<4>(smem, global); }

}  // namespace polymoe
