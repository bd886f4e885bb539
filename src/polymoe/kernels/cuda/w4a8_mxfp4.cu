#include "w4a8.cuh"

POLYMOE_W4A8_SIZES(gated, kGated)
POLYMOE_W4A8_SIZES(down, kDown)
