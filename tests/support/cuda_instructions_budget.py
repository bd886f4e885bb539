"""What the CUDA kernels may cost in instructions, and the disassembly that counts them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

__all__ = ["CVT_COSTS", "DISASSEMBLED", "MMA_COSTS", "TILED_COSTS", "instructions"]


def instructions() -> Any:
    """benchmarks/cuda_instructions.py, where there is a disassembler."""
    pytest.importorskip("triton")
    module = importlib.import_module("cuda_instructions")
    if not module.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    return module


# Instructions for eight weights of each lane: a budget, not a wish.
MMA_COSTS = {
    "mxfp4": 19.0,
    "nvfp4": 21.0,
    "int4_g32": 17.5,
    "int4_g128": 17.0,
    "int4_g32_zp": 17.5,
    "int4_g128_zp": 17.0,
}

DISASSEMBLED = [
    name if name in ("mxfp4", "nvfp4", "int4_g32") else pytest.param(name, marks=pytest.mark.slow) for name in MMA_COSTS
]
"""Formats whose kernels are disassembled, which takes seconds each; those of INT4 differ little."""

CVT_COSTS = {"mxfp4": 10.0, "nvfp4": 14.0}
"""Where instructions convert the codes and their scales."""

TILED_COSTS = {"mxfp4": 11.5, "mxfp8": 22.5}
"""In the kernels for many rows, for 16 of them, where instructions convert FP4."""
