// Entry points of kernels.
#pragma once

// A kernel, whose body is a call of a function template with its ARGS. BOUNDS, in parentheses: most threads of a CTA,
// and how many CTAs are to fit on an SM at least.
#define POLYMOE_KERNEL(NAME, ARGS, BOUNDS, ...)                                                            \
    extern "C" __global__ void __launch_bounds__ BOUNDS NAME(const __grid_constant__ polymoe::ARGS args) { \
        using namespace polymoe;                                                                           \
        __VA_ARGS__(args);                                                                                 \
    }
