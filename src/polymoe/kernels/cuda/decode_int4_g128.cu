#include "decode.cuh"

POLYMOE_DECODE_ALL(Int4<128>)
