"""The launches of a call as data: kernels, their arguments by name, and on what they depend.

A field's value is named: an address of the call, an array of the workspace, or an attribute of
:class:`~polymoe.kernels.cuda.launch.shape.CallShape`, which follows from the layer and the number of tokens. So are
grids, threads and the condition on which a launch is made. :class:`~polymoe.kernels.cuda.launch.call.Call` makes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from polymoe.kernels.cuda.launch.args import (
    FewRowsArgs,
    FinalizeArgs,
    GemmArgs,
    PermutationArgs,
    PermuteArgs,
    QuantizePermutedArgs,
    QuantizeRowsArgs,
    QuantizeWholeRowsArgs,
    RoundingArgs,
)

__all__ = [
    "BY_TOKEN", "FINALIZE", "PERMUTATION", "PERMUTE_X", "GemmInput", "Step", "gemm_steps", "quantize_rows",
    "quantize_tiles", "quantize_whole_rows",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A launch.

    Attributes:
        kernel: name of the kernel; for a grouped GEMM, of the layer's part that it computes.
        unit: name of the cubin; empty for a grouped GEMM.
        args: the kernel's argument.
        fields: name of the value of each field. Others are 0, but for a GEMM's constants.
        grid: names of the numbers of CTAs; empty for one, or for one on each SM in a GEMM.
        threads: of a CTA, or the name of their number.
        when: name of the condition on which it is launched.
        narrow: whether it computes the narrow work tiles.
    """

    kernel: str
    unit: str = ""
    args: type[ctypes.Structure]
    fields: Mapping[str, str]
    grid: tuple[str, ...] = ()
    threads: int | str = 0
    when: str = "always"
    narrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmInput:
    """Rows that a grouped GEMM reads.

    Attributes:
        buffer: how they lie in the workspace, a name of :data:`~polymoe.kernels.cuda.launch.shape.BUFFERS`; empty where
            they are the call's x.
        step: the launch that writes them, or None.
        by_token: whether there is a row for each token, not for each of its experts.
        part: the part whose kernel reads them.
        when: name of the condition on which they are what the GEMM reads. Of a family's, the first that holds counts.
    """

    buffer: str = ""
    step: Step | None = None
    by_token: bool = True
    part: str = "gate_up"
    when: str = "always"


def _fields(same: str, **others: str) -> dict[str, str]:
    """Fields that have their values' names, and others."""
    return {**{name: name for name in same.split()}, **others}


_TO_PERMUTE = _fields(
    "ids permuted_to_expanded work_tiles narrow_tiles lists expanded_to_permuted counts rows first_expert experts",
    block_m="block_m", narrow_m="narrow_m", ctas="sms", long_ids="long_ids", even="even_tiles",
)  # fmt: skip


def _permutation(kernel: str, threads: int, when: str, grid: tuple[str, ...] = ()) -> Step:
    return Step(
        kernel=f"permutation_{kernel}", unit="permute", args=PermutationArgs, fields=_TO_PERMUTE, grid=grid,
        threads=threads, when=when,
    )  # fmt: skip


PERMUTATION = (
    _permutation("one_warp", 32, "one_warp_sorts"),
    _permutation("one_cta", 1024, "one_cta_sorts"),
    _permutation("count", 1024, "many_ctas_sort", ("sorting_ctas",)),
    _permutation("many_ctas", 1024, "many_ctas_sort", ("sorting_ctas",)),
)
"""Expanded rows (one per token and chosen expert) are sorted by expert and cut into work tiles."""

PERMUTE_X = Step(
    kernel="permute_x", unit="permute", args=PermuteArgs, grid=("tokens",), threads=256,
    fields=_fields("x expanded_to_permuted top_k", out="x_rows", columns="hidden"),
)  # fmt: skip
"""A token's row is copied once for each of its experts, to tiles of 64 columns."""


def quantize_tiles(kernel: str) -> Step:
    """A token's row is rounded once, with a scale for each 128 columns, and written once for each of its experts."""
    return Step(
        kernel=kernel, unit="quantize", args=QuantizePermutedArgs, grid=("tokens", "hidden_ctas"), threads=256,
        fields=_fields("x expanded_to_permuted top_k x_dtype", out="x_rows", columns="hidden"),
    )  # fmt: skip


def quantize_rows(kernel: str) -> Step:
    """A token's row is rounded, with a scale for each 128 columns."""
    return Step(
        kernel=kernel, unit="quantize", args=QuantizeRowsArgs, grid=("tokens", "x_row_ctas"), threads="x_row_threads",
        fields=_fields("x x_dtype", out="x_rows", columns="hidden"),
    )  # fmt: skip


def quantize_whole_rows(kernel: str, tiles: bool = False) -> tuple[Step, Step, Step]:
    """Rows are rounded, each with one scale: those of x by token; those of x by token, written once for each of a
    token's experts; and those of h, to ``tiles`` or to rows."""
    step = Step(
        kernel=kernel, unit="quantize", args=QuantizeWholeRowsArgs, grid=("x_quantizing_ctas",),
        threads="x_quantizing_threads", fields=_fields(
            "x x_dtype ids first_expert long_ids top_k", out="x_rows", columns="hidden", rows="x_quantized_rows",
            threads="x_row_threads", input_scales="up_input_scales",
        ),
    )  # fmt: skip
    h = _fields(
        "ids first_expert long_ids expanded_to_permuted rows", x="h", out="rounded_h", columns="intermediate",
        x_dtype="float32", threads="h_row_threads", input_scales="down_input_scales",
        **{"tiles": "always"} if tiles else {},
    )  # fmt: skip
    permuted = {**step.fields, "expanded_to_permuted": "expanded_to_permuted"}
    of_h = replace(step, fields=h, grid=("h_quantizing_ctas",), threads="h_quantizing_threads")
    return step, replace(step, fields=permuted), of_h


_SORTING = _fields("rows first_expert experts long_ids", ids="sorted_ids")
_ROUNDING = {"x_dtype": "x_dtype", "input_scales": "up_input_scales"}


@cache
def gemm_steps(part: str, args: type[GemmArgs]) -> tuple[Step, Step]:
    """A part's grouped GEMM: for work tiles of ``block_m`` rows, and for narrow ones."""
    down, sorts, rounds = part == "down", issubclass(args, FewRowsArgs), args is RoundingArgs
    of_part = (
        {"x": "down_x", "out": "y", **({"input_scales": "down_input_scales"} if rounds else {})}
        if down
        else _fields("", x="gate_up_x", out="h", top_k="gate_up_top_k", router_weights="input_weights")
        | (_ROUNDING if rounds else {})
    )
    fields = _fields("permuted_to_expanded work_tiles", **of_part, **(_SORTING if sorts else {}))
    lists = ("down_list", "narrow_down_list") if down else ("gate_up_list", "narrow_gate_up_list")
    narrow = {**fields, "num_tiles": lists[1], "work_tiles": "narrow_tiles"}
    return (
        Step(kernel=part, args=args, fields={**fields, "num_tiles": lists[0]}),
        Step(kernel=part, args=args, fields=narrow, when="has_narrow_tiles", narrow=True),
    )


def _finalize(kernel: str, when: str = "always", **fields: str) -> Step:
    return Step(
        kernel=kernel, unit="finalize", args=FinalizeArgs, threads=128, when=when,
        grid=("finalizing_ctas", "finalizing_column_ctas"),
        fields=_fields(
            "y ids out top_k first_expert experts long_ids out_dtype tokens tokens_per_cta", columns="hidden",
            weights="output_weights", **fields,
        ),
    )  # fmt: skip


BY_TOKEN = GemmInput()
"""The call's x, read where it lies."""

FINALIZE: Mapping[str, tuple[Step, ...]] = {
    "bf16_rows": (
        _finalize("finalize_bf16", "one_token_a_cta", expanded_to_permuted="expanded_to_permuted"),
        _finalize("finalize_many_bf16", "many_tokens_a_cta", expanded_to_permuted="expanded_to_permuted"),
    ),
    "float32_rows": (_finalize("finalize_f32"),),
}
"""The weighted sum over each token's experts, by how y lies in the workspace: by permuted or by expanded row."""
