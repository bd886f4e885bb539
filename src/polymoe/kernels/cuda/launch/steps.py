"""The launches of a call as data: kernels, their arguments by name, and on what they depend.

A field's value is named: an address or a kind of the call, an array of the workspace, or a number that follows from
the layer or from the number of tokens (:mod:`.shape`). So are grids, threads and the condition on which a launch is
made. :class:`~polymoe.kernels.cuda.launch.call.PreparedCall` makes them.
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
    when: str = "true"
    narrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmInput:
    """Rows that a grouped GEMM reads.

    Attributes:
        source: name of the array.
        buffer: how they lie in the workspace, a name of :data:`~polymoe.kernels.cuda.launch.shape.BUFFERS`; empty where
            they lie elsewhere, or are what the GEMM before writes.
        step: the launch that writes them, or None.
        by_token: whether there is a row for each token, not for each of its experts.
        part: the part whose kernel reads them.
        when: name of the condition on which they are what the GEMM reads. Of a family's, the first that holds counts.
    """

    source: str = "x"
    buffer: str = ""
    step: Step | None = None
    by_token: bool = True
    part: str = "gate_up"
    when: str = "true"


def _fields(same: str, **others: str) -> dict[str, str]:
    """Fields that have their values' names, and others."""
    return {**{name: name for name in same.split()}, **others}


BY_TOKEN = GemmInput()
"""The call's x, read where it lies."""

AS_WRITTEN = GemmInput(source="h", by_token=False, part="down")
"""h as the first GEMM writes it."""

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

X_IN_TILES = GemmInput(
    source="x_rows", buffer="bf16_tiles", by_token=False, step=Step(
        kernel="permute_x", unit="permute", args=PermuteArgs, grid=("tokens",), threads=256,
        fields=_fields("x expanded_to_permuted top_k", out="x_rows", columns="hidden"),
    ),
)  # fmt: skip
"""A token's row is copied once for each of its experts, to tiles of 64 columns."""


def quantized_tiles(**changes: str) -> GemmInput:
    """A token's row is rounded once, with a scale for each 128 columns, and written once for each of its experts."""
    step = Step(
        kernel="quantize_permuted", unit="quantize", args=QuantizePermutedArgs, grid=("tokens", "hidden_ctas"),
        threads=256, fields=_fields("x expanded_to_permuted top_k x_dtype", out="x_rows", columns="hidden"),
    )  # fmt: skip
    return GemmInput(source="x_rows", buffer="e4m3_tiles", step=step, by_token=False, **changes)


H_IN_TILES = replace(
    AS_WRITTEN, source="rounded_h", buffer="e4m3_tiles", step=Step(
        kernel="quantize_permuted", unit="quantize", args=QuantizePermutedArgs, grid=("rows", "intermediate_ctas"),
        threads=256, fields=_fields(
            "expanded_to_permuted", x="h", x_dtype="float32", out="rounded_h", columns="intermediate",
        ),
    ),
)  # fmt: skip
"""A row of h is rounded, with a scale for each 128 columns."""

QUANTIZED_ROWS = GemmInput(
    source="x_rows", buffer="e4m3_rows", step=Step(
        kernel="quantize_rows", unit="quantize", args=QuantizeRowsArgs, grid=("tokens", "x_row_ctas"),
        threads="x_row_threads", fields=_fields("x x_dtype", out="x_rows", columns="hidden"),
    ),
)  # fmt: skip
"""A token's row is rounded, with a scale for each 128 columns."""


def quantized_whole_rows(
    kernel: str, buffer: str = "e4m3_rows", *, by_token: bool = True, when: str = "true"
) -> GemmInput:
    """A token's row is rounded with one scale, and written once, or once for each of its experts."""
    where = {} if by_token else _fields("expanded_to_permuted")
    step = Step(
        kernel=kernel, unit="quantize", args=QuantizeWholeRowsArgs, grid=("x_quantizing_ctas",),
        threads="x_quantizing_threads", fields=_fields(
            "x x_dtype ids first_expert long_ids top_k", out="x_rows", columns="hidden", rows="x_quantized_rows",
            threads="x_row_threads", input_scales="x_scales", **where,
        ),
    )  # fmt: skip
    return GemmInput(source="x_rows", buffer=buffer, step=step, by_token=by_token, when=when)


def quantized_h(kernel: str, buffer: str) -> GemmInput:
    """Rows of h are rounded, each with one scale."""
    step = Step(
        kernel=kernel, unit="quantize", args=QuantizeWholeRowsArgs, grid=("h_quantizing_ctas",),
        threads="h_quantizing_threads", fields=_fields(
            "ids first_expert long_ids expanded_to_permuted rows", x="h", out="rounded_h", columns="intermediate",
            x_dtype="float32", threads="h_row_threads", input_scales="h_scales",
            **({"tiles": "true"} if buffer == "e4m3_tiles" else {}),
        ),
    )  # fmt: skip
    return replace(AS_WRITTEN, source="rounded_h", buffer=buffer, step=step)


@cache
def gemm_steps(args: type[GemmArgs], x: GemmInput) -> tuple[Step, Step]:
    """A grouped GEMM that reads ``x``: for work tiles of ``block_m`` rows, and for narrow ones."""
    if x.part == "down":
        lists, fields = ("down_list", "narrow_down_list"), _fields("", out="y")
    else:
        lists, fields = ("gate_up_list", "narrow_gate_up_list"), _fields("", out="h", router_weights="input_weights")
    fields |= _fields("permuted_to_expanded", x=x.source) | ({"top_k": "top_k"} if x.by_token else {})
    if issubclass(args, FewRowsArgs):
        fields |= _fields("rows first_expert experts long_ids", ids="sorted_ids")
    if args is RoundingArgs:
        fields |= {"input_scales": "h_scales"} if x.part == "down" else _fields("x_dtype", input_scales="x_scales")
    wide = {**fields, "tiles": lists[0], "work_tiles": "work_tiles"}
    narrow = {**fields, "tiles": lists[1], "work_tiles": "narrow_tiles"}
    return Step(kernel=x.part, args=args, fields=wide), Step(kernel=x.part, args=args, fields=narrow, narrow=True)


def _finalize(kernel: str, when: str = "true", **fields: str) -> Step:
    return Step(
        kernel=kernel, unit="finalize", args=FinalizeArgs, threads=128, when=when,
        grid=("finalizing_ctas", "finalizing_column_ctas"),
        fields=_fields(
            "y ids out top_k first_expert experts long_ids out_dtype tokens tokens_per_cta", columns="hidden",
            weights="output_weights", **fields,
        ),
    )  # fmt: skip


FINALIZE: Mapping[str, tuple[Step, ...]] = {
    "bf16_rows": (
        _finalize("finalize_bf16", "one_token_a_cta", expanded_to_permuted="expanded_to_permuted"),
        _finalize("finalize_many_bf16", "many_tokens_a_cta", expanded_to_permuted="expanded_to_permuted"),
    ),
    "float32_rows": (_finalize("finalize_f32"),),
}
"""The weighted sum over each token's experts, by how y lies in the workspace: by permuted or by expanded row."""
