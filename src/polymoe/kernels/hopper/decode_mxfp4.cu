#include "decode.cuh"

POLYMOE_DECODE_ALL(Mxfp4)
POLYMOE_DECODE_SHORT(Mxfp4)
