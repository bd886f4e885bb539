"""The CUDA backend: kernels for SM90, SM100 and SM120, compiled ahead of time."""

from __future__ import annotations

from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.cuda.config import CudaConfig

__all__ = ["Cuda", "CudaConfig"]
