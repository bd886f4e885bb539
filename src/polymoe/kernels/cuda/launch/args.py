"""Arguments of the kernels, as structures that match those of the CUDA sources. The sources document the fields."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "E4M3_ROWS",
    "NUMBERED_DTYPES",
    "FewRowsArgs",
    "FinalizeArgs",
    "GemmArgs",
    "PermutationArgs",
    "PermuteArgs",
    "QuantizePermutedArgs",
    "QuantizeRowsArgs",
    "QuantizeWholeRowsArgs",
    "RoundingArgs",
    "dtype_number",
]  # fmt: skip

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float

NUMBERED_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of x and the output, by name."""

E4M3_ROWS = 3
"""In place of a dtype of x: rows of E4M3 codes and their scales."""


@cache
def dtype_number(dtype: torch.dtype) -> int:
    """Return the number of a dtype of :data:`NUMBERED_DTYPES`. A bias has it plus 1, or 0 where there is no bias."""
    return NUMBERED_DTYPES.index(str(dtype).removeprefix("torch."))


class GemmArgs(ctypes.Structure):
    """Arguments of a grouped GEMM: gate and up with the activation, or down."""

    _fields_ = (
        *((name, _POINTER) for name in ("codes", "scales", "bias", "up_bias", "expert_scale", "up_expert_scale")),
        *((name, _POINTER) for name in ("x", "out", "tiles", "work_tiles", "permuted_to_expanded")),
        ("router_weights", _POINTER),
        *((name, _LONG) for name in ("codes_stride", "scales_stride")),
        *((name, _INT) for name in ("n", "k", "top_k", "stages", "x_buffers", "block_m", "activation", "bias_dtype")),
        *((name, _FLOAT) for name in ("alpha", "beta", "limit")),
        ("second_launch", _INT),
    )


class FewRowsArgs(GemmArgs):
    """Arguments of a grouped GEMM that sorts few rows by itself: those of :class:`GemmArgs`, and more."""

    _fields_ = (
        ("ids", _POINTER),
        *((name, _INT) for name in ("rows", "first_expert", "experts", "long_ids")),
    )


class RoundingArgs(FewRowsArgs):
    """Arguments of a grouped GEMM that also rounds x by itself."""

    _fields_ = (("x_dtype", _INT), ("input_scales", _POINTER))


class PermutationArgs(ctypes.Structure):
    """Arguments of the kernels that group expanded rows by expert."""

    _fields_ = (
        *((name, _POINTER) for name in ("ids", "permuted_to_expanded", "work_tiles", "narrow_tiles", "lists")),
        *((name, _POINTER) for name in ("expanded_to_permuted", "counts")),
        *(
            (name, _INT)
            for name in ("rows", "first_expert", "experts", "block_m", "narrow_m", "ctas", "long_ids", "even")
        ),
    )


class PermuteArgs(ctypes.Structure):
    """Arguments of the kernel that copies x into permuted tiles."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "out", "expanded_to_permuted")),
        *((name, _INT) for name in ("columns", "top_k")),
    )


class QuantizePermutedArgs(ctypes.Structure):
    """Arguments of the kernel that rounds x to E4M3 in permuted tiles."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "out", "expanded_to_permuted")),
        *((name, _INT) for name in ("columns", "top_k", "x_dtype")),
    )


class QuantizeRowsArgs(ctypes.Structure):
    """Arguments of the kernel that rounds x to E4M3 row by row."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "out")),
        *((name, _INT) for name in ("columns", "x_dtype")),
    )


class QuantizeWholeRowsArgs(ctypes.Structure):
    """Arguments of the kernel that rounds x or h to E4M3 with one scale for a row."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "out", "expanded_to_permuted", "input_scales", "ids")),
        *((name, _INT) for name in ("rows", "columns", "x_dtype", "top_k", "tiles", "threads")),
        *((name, _INT) for name in ("first_expert", "long_ids")),
    )


class FinalizeArgs(ctypes.Structure):
    """Arguments of the kernel for the weighted sum over each token's experts."""

    _fields_ = (
        *((name, _POINTER) for name in ("y", "expanded_to_permuted", "ids", "weights", "out")),
        *((name, _INT) for name in ("top_k", "columns", "first_expert", "experts", "long_ids", "out_dtype")),
        *((name, _INT) for name in ("tokens", "tokens_per_cta")),
    )
