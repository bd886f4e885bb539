#include "whole_bf16.cuh"

POLYMOE_WHOLE_BF16(gated, kGated)
POLYMOE_WHOLE_BF16(plain, kPlain)
POLYMOE_WHOLE_BF16(down, kDown)
