#include "prefill.cuh"

POLYMOE_PREFILL_ALL(Int4<128>)
