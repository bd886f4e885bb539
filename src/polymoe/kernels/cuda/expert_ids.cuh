// Expert ids of a call, of 32 or 64 bits, in a kernel's arguments: `ids` and `long_ids`.
#pragma once

namespace polymoe {

template <class Args, class Row>
__device__ __forceinline__ long long expert_id(const Args& args, Row row) {
    return args.long_ids ? static_cast<const long long*>(args.ids)[row] : static_cast<const int*>(args.ids)[row];
}

// Which of the local experts an expanded row chose, or -1.
template <class Args>
__device__ __forceinline__ int local_expert(const Args& args, int row) {
    if (row >= args.rows) return -1;
    const long long id = expert_id(args, row) - args.first_expert;
    return id >= 0 && id < args.experts ? static_cast<int>(id) : -1;
}

}  // namespace polymoe
