#include "decode.cuh"

POLYMOE_DECODE_ALL(Nvfp4)
POLYMOE_DECODE_SHORT(Nvfp4)
