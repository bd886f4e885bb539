// Programmatic dependent launch.
#pragma once

namespace polymoe {

#ifdef POLYMOE_UNCHAINED  // SM80 to SM89

__device__ __forceinline__ void grid_dependency_wait() {}
__device__ __forceinline__ void launch_dependents() {}

#else

// Waits until the kernel before this one in the stream has finished and its writes are visible.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel in the stream start.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#endif

}  // namespace polymoe
