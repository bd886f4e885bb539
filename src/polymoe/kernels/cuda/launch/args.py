"""Arguments of the kernels, as structures that match those of the CUDA sources. The sources document the fields."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NUMBERED_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of x and the output, by name."""

E4M3_ROWS = 3
"""In place of a dtype of x: rows of E4M3 codes and their scales."""


@cache
def dtype_number(dtype: torch.dtype) -> int:
    """Return the number of a dtype of :data:`NUMBERED_DTYPES`. A bias has it plus 1, or 0 where there is no bias."""
    return NUMBERED_DTYPES.index(str(dtype).removeprefix("torch."))


_KINDS: dict[str, type[Any]] = {
    "pointers": ctypes.c_void_p,
    "ints": ctypes.c_int,
    "longs": ctypes.c_longlong,
    "unsigned_longs": ctypes.c_ulonglong,
    "floats": ctypes.c_float,
}


def fields(*groups: str) -> tuple[tuple[str, type[Any]], ...]:
    """Return the fields of a structure. Each group is their kind, then their names."""
    return tuple((name, _KINDS[kind]) for kind, *names in map(str.split, groups) for name in names)


class GemmArgs(ctypes.Structure):
    """Arguments of a grouped GEMM: gate and up with the activation, or down."""

    _fields_ = fields(
        "pointers codes scales bias up_bias expert_scale up_expert_scale",
        "pointers x out tiles work_tiles permuted_to_expanded router_weights",
        "longs codes_stride scales_stride",
        "ints n k top_k stages x_buffers block_m activation bias_dtype",
        "floats alpha beta limit",
        "ints second_launch",
    )


class FewRowsArgs(GemmArgs):
    """Arguments of a grouped GEMM that sorts few rows by itself: those of :class:`GemmArgs`, and more."""

    _fields_ = fields("pointers ids", "ints rows first_expert experts long_ids")


class RoundingArgs(FewRowsArgs):
    """Arguments of a grouped GEMM that also rounds x by itself."""

    _fields_ = fields("ints x_dtype", "pointers input_scales")


class PermutationArgs(ctypes.Structure):
    """Arguments of the kernels that group expanded rows by expert."""

    _fields_ = fields(
        "pointers ids permuted_to_expanded work_tiles narrow_tiles lists expanded_to_permuted counts",
        "ints rows first_expert experts block_m narrow_m ctas long_ids even",
    )


class PermuteArgs(ctypes.Structure):
    """Arguments of the kernel that copies x into permuted tiles."""

    _fields_ = fields("pointers x out expanded_to_permuted", "ints columns top_k")


class QuantizePermutedArgs(ctypes.Structure):
    """Arguments of the kernel that rounds x to E4M3 in permuted tiles."""

    _fields_ = fields("pointers x out expanded_to_permuted", "ints columns top_k x_dtype")


class QuantizeRowsArgs(ctypes.Structure):
    """Arguments of the kernel that rounds x to E4M3 row by row."""

    _fields_ = fields("pointers x out", "ints columns x_dtype")


class QuantizeWholeRowsArgs(ctypes.Structure):
    """Arguments of the kernel that rounds x or h to E4M3 with one scale for a row."""

    _fields_ = fields(
        "pointers x out expanded_to_permuted input_scales ids",
        "ints rows columns x_dtype top_k tiles threads first_expert long_ids",
    )


class FinalizeArgs(ctypes.Structure):
    """Arguments of the kernel for the weighted sum over each token's experts."""

    _fields_ = fields(
        "pointers y expanded_to_permuted ids weights out",
        "ints top_k columns first_expert experts long_ids out_dtype tokens tokens_per_cta",
    )
