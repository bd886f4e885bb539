#include "prefill.cuh"

POLYMOE_PREFILL_ALL(Nvfp4)
