#include "prefill.cuh"

POLYMOE_PREFILL_ALL(Mxfp4)
