// Stands in for the kernels' ptx/griddepcontrol.cuh.
#pragma once
#include "../cuda.h"

namespace polymoe {

inline void grid_dependency_wait() { emulator::here.waited = true; }
inline void launch_dependents() {}

}  // namespace polymoe
