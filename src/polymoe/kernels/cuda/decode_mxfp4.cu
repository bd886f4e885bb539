#include "decode.cuh"

POLYMOE_DECODE_ALL(Mxfp4)
