#include "decode.cuh"

POLYMOE_DECODE_ALL(Nvfp4)
