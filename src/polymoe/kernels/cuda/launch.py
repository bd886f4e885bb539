"""One call of the Hopper kernels: buffers, arguments, launches. What the structures mean stands in the CUDA sources."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polymoe.kernels.cuda.compiled import kernel

__all__ = [
    "DECODE", "FORMATS", "IN_TILES", "PREFILL", "W4A8", "WHOLE", "E4m3Shape", "Function", "Matrix", "Rows", "Shape",
    "WholeShape", "decode", "decode_fits", "in_tiles",
]  # fmt: skip

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

SHARED_BYTES = 227 * 1024 - 2048
"""Dynamic shared memory of one block; the rest is static."""

FORMATS: dict[str, tuple[int, int]] = {
    "mxfp4": (128, 1),
    "nvfp4": (256, 1),
    "int4_g32": (256, 1),
    "int4_g128": (128, 2),
}
"""Formats that there are kernels for: bytes of scales beside 64 rows and so many times 64 columns (formats.cuh)."""

DECODE: tuple[tuple[int, int], ...] = tuple((rows, height) for rows in (8, 12, 16) for height in (64, 128))
"""Kernels for decode: the most rows of x of an item, and rows of weights of a tile."""

_STAGE_BLOCKS, _CONSUMERS = 8, 16  # decode.cuh: kStageBlocks, kConsumers
_LEAST_STAGES, _MOST_STAGES = 3, 16
_E4M3_TILE = 128 + 4  # bytes of a row: codes of 128 columns and their scale (rows_fp8.cu)


class _Gemm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("codes", "scales", "bias", "up_bias", "scale", "up_scale", "x", "out")),
        *((name, _POINTER) for name in ("count", "items", "order", "weights")),
        *((name, _LONG) for name in ("codes_expert", "scales_expert")),
        *((name, _INT) for name in ("rows", "columns", "slots", "stages", "buffers", "item_rows")),
        *((name, _INT) for name in ("activation", "bias_dtype")),
        *((name, _FLOAT) for name in ("alpha", "beta", "limit")),
    )


class _Dispatch(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("ids", "order", "items", "count", "places", "counts")),
        *((name, _INT) for name in ("rows", "first_expert", "experts", "block", "long_ids")),
    )


class _Spread(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "out", "places")),
        *((name, _INT) for name in ("columns", "slots")),
    )


class _Quantize(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "out", "places")),
        *((name, _INT) for name in ("columns", "slots", "x_dtype")),
    )


class _Combine(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("y", "places", "ids", "weights", "out")),
        *((name, _INT) for name in ("slots", "columns", "first_expert", "experts", "long_ids", "out_dtype")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Packed ``up`` (gate and up in turns of 8 rows) or ``down``.

    Attributes:
        format: one of :data:`FORMATS`.
        codes, scales: uint8 [E, bytes]; scales are None where weights have none.
        rows, columns: N and K; of ``up`` with a gate, N is 2F.
        bias, up_bias: [E, N] in a 16-bit or 32-bit float, or None; with a gate, [E, F] each.
        scale, up_scale: float32 [E], what all weights are multiplied by, or None; with a gate, the gate's and up's.
    """

    format: str
    codes: Tensor
    scales: Tensor | None
    rows: int
    columns: int
    bias: Tensor | None = None
    up_bias: Tensor | None = None
    scale: Tensor | None = None
    up_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which routed rows go to which expert: ids and weights [T, A], the local range of experts, and what their weights
    multiply."""

    ids_TA: Tensor
    weights_TA: Tensor
    first_expert: int
    experts: int
    weight_on_input: bool


@dataclass(frozen=True, slots=True)
class Function:
    """The activation: 0 SwiGLU, 1 GELU, 2 its tanh form (ignored without a gate), and constants; limit 0 is none."""

    number: int
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = 0.0


def _decode_ring(format: str, rows: int, columns: int) -> tuple[int, int, int]:
    """Stages of the ring, buffers of x, and bytes of shared memory, for items of ``rows`` rows."""
    scale_bytes, blocks = FORMATS[format]
    stage = _STAGE_BLOCKS * 2048 + _STAGE_BLOCKS // blocks * scale_bytes
    sums, x_bytes = _CONSUMERS * _eights(rows) // 8 * 1024, rows * (2 * columns + 16)
    stages, buffers = 0, 0
    for buffers in (2, 1):
        stages = (SHARED_BYTES - sums - buffers * x_bytes - 128) // stage
        if stages > _LEAST_STAGES:
            break
    stages = min(stages, _MOST_STAGES)
    return stages, buffers, sums + buffers * x_bytes + 128 + stages * stage


def decode_fits(format: str, rows: int, columns: int) -> bool:
    """Whether ``rows`` rows of x with ``columns`` columns leave room for weights on their way."""
    return _decode_ring(format, rows, columns)[0] >= _LEAST_STAGES


def decode(
    up: Matrix, down: Matrix, gated: bool, function: Function, x_TH: Tensor, rows: Rows, out_TH: Tensor,
    block: int, height: int,
) -> None:  # fmt: skip
    """``out_TH`` for few rows an expert: ``block`` rows of x an item, at most 16; ``height`` rows of weights a tile,
    but 128 where K is short."""
    tokens, slots = rows.ids_TA.shape
    routed = tokens * slots
    plan = _dispatch(rows, block)
    h_RF = x_TH.new_empty(routed, down.columns)
    y_RH = x_TH.new_empty(routed, down.rows, dtype=torch.float32)
    grid = (torch.cuda.get_device_properties(x_TH.device).multi_processor_count,)
    for name, matrix, x, out, divisor in (("up", up, x_TH, h_RF, slots), ("down", down, h_RF, y_RH, 0)):
        stages, buffers, shared = _decode_ring(matrix.format, block, matrix.columns)
        kind = name if name == "down" else "gated" if gated else "plain"
        args = _gemm(matrix, x, out, plan, rows if name == "up" else None, function, divisor, stages, buffers, block)
        # Tiles of 64 rows are shared out along K in eight parts of 64 columns: some warps would have none.
        tile = 128 if matrix.columns <= 256 else height
        launch = kernel(f"decode_{matrix.format}", f"decode_{kind}_{_eights(block)}_{tile}")
        launch(args, grid, (_CONSUMERS + 2) * 32, shared)
    _combine(y_RH, rows, out_TH)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a prefill kernel: warpgroups that multiply, groups of 64 rows each, times 64 columns in a stage."""

    warpgroups: int
    groups: int
    blocks: int

    def stage_bytes(self, format: str, rows: int) -> int:
        """Bytes of a stage for items of ``rows`` rows (packed.cuh: Stage)."""
        scale_bytes, blocks = FORMATS[format]
        group = self.blocks * 2048 + -(-self.blocks // blocks) * scale_bytes
        return _round_up(self.blocks * rows * 128 + self.warpgroups * self.groups * group, 1024)

    def scratch_bytes(self, rows: int) -> int:
        """Bytes behind the stages."""
        return 0


PREFILL: dict[int, Shape] = {32: Shape(4, 2, 2), 64: Shape(4, 1, 2), 128: Shape(2, 2, 2), 256: Shape(2, 1, 1)}
"""Kernels for prefill, by the most rows of x of an item."""


@dataclass(frozen=True, slots=True)
class E4m3Shape(Shape):
    """Of a kernel for rows in E4M3."""

    def stage_bytes(self, format: str, rows: int) -> int:
        """Bytes of a stage for items of ``rows`` rows (packed.cuh: Stage)."""
        group = self.blocks * (2048 + 128)
        return _round_up(self.blocks // 2 * rows * _E4M3_TILE + self.warpgroups * self.groups * group, 1024)

    def scratch_bytes(self, rows: int) -> int:
        """A table of magnitudes, and the largest number of each row, of three tiles that take turns."""
        return 128 + 3 * rows * 4


W4A8 = {
    16: E4m3Shape(4, 1, 4), 32: E4m3Shape(4, 1, 4), 64: E4m3Shape(4, 1, 4), 128: E4m3Shape(2, 2, 2),
}  # fmt: skip
"""Kernels for 4-bit weights and rows in E4M3, by the most rows of x of an item. A tile is 256 rows of weights: with a
gate 128 columns of h, which share a scale."""


@dataclass(frozen=True, slots=True)
class WholeShape(Shape):
    """Of a kernel for weights that are not decoded: times 128 bytes of a row in a stage."""

    def stage_bytes(self, format: str, rows: int) -> int:
        """Bytes of a stage for items of ``rows`` rows (whole.cuh: Stage)."""
        return self.blocks * (self.warpgroups * self.groups * 64 + rows) * 128


WHOLE = {
    32: WholeShape(2, 1, 2), 64: WholeShape(2, 1, 2), 128: WholeShape(2, 2, 1), 256: WholeShape(2, 1, 1),
}  # fmt: skip
"""Kernels for weights that are not decoded, by the most rows of x of an item."""

IN_TILES: dict[str, Mapping[int, Shape]] = {"prefill": PREFILL, "w4a8": W4A8, "whole": WHOLE}
"""The kinds of kernels that take x in tiles."""

_E4M3 = ("w4a8",)
"""Which of them take it in E4M3; the others take bfloat16."""


def in_tiles(
    kernels: str, up: Matrix, down: Matrix, gated: bool, function: Function, x_TH: Tensor, rows: Rows, out_TH: Tensor,
    block: int, down_block: int,
) -> None:  # fmt: skip
    """``out_TH`` by one of :data:`IN_TILES`, in items of at most ``block`` rows; x is bfloat16, or to be quantized. The
    down projection of the same items is made by the kernel for items of ``down_block`` rows, which may be more."""
    slots, padded = rows.ids_TA.shape[1], _rows_in_tiles(rows)
    plan = _dispatch(rows, block, places=True)
    e4m3 = kernels in _E4M3
    x_tiles = _spread(x_TH, plan, padded, slots, e4m3)
    h_tiles = _empty_tiles(x_TH, padded, down.columns, e4m3)
    y_RH = x_TH.new_empty(rows.ids_TA.numel(), down.rows, dtype=torch.bfloat16)
    grid = (torch.cuda.get_device_properties(x_TH.device).multi_processor_count,)
    for name, matrix, x, out, most in (("up", up, x_tiles, h_tiles, block), ("down", down, h_tiles, y_RH, down_block)):
        shape = IN_TILES[kernels][most]
        stage, beside = shape.stage_bytes(matrix.format, most), shape.scratch_bytes(most) + 1024
        stages = min((SHARED_BYTES - beside) // stage, _MOST_STAGES)
        kind = name if name == "down" else "gated" if gated else "plain"
        gemm = _gemm(matrix, x, out, plan, rows if name == "up" else None, function, 0, stages, 1, most)
        launch = kernel(f"{kernels}_{matrix.format}", f"{kernels}_{kind}_{most}")
        launch(gemm, grid, shape.warpgroups * 128 + 128, stages * stage + beside)
    _combine(y_RH, rows, out_TH, plan.places)


_MANY_ROWS, _ROWS_A_BLOCK = 2048, 1024
"""Routed rows from which several thread blocks sort them, and how many each has at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Routed rows in expert order, items (expert, first row, rows, first row in tiles) and their number; where each
    routed row is (rows.cu), or None."""

    order: Tensor
    items: Tensor
    count: Tensor
    places: Tensor | None


def _dispatch(rows: Rows, block: int, places: bool = False) -> Plan:
    routed, ids = rows.ids_TA.numel(), rows.ids_TA.contiguous()
    most = min(rows.experts, routed) + routed // block
    blocks = min(32, routed // _ROWS_A_BLOCK) if routed > _MANY_ROWS else 0
    sizes = (4 * most, 4 * routed if places else 0, 4, routed, blocks * rows.experts)
    work = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device)
    items, where, count, order, counts = work.split(sizes)
    plan = Plan(order, items.view(most, 4), count, where.view(routed, 4) if places else None)
    args = _Dispatch(
        *map(_at, (ids, order, items, count, plan.places, counts)), routed, rows.first_expert, rows.experts, block,
        ids.dtype == torch.int64,
    )  # fmt: skip
    if blocks:
        kernel("rows", "count_many")(args, (blocks,), 1024)
        kernel("rows", "dispatch_many")(args, (blocks,), 1024)
    else:
        few = routed <= 32
        kernel("rows", "dispatch_few" if few else "dispatch")(args, (1,), 32 if few else 1024)
    return plan


def _spread(x_TH: Tensor, plan: Plan, padded: int, slots: int, e4m3: bool) -> Tensor:
    """Every routed row's x in tiles, with room for ``padded`` rows."""
    tokens, columns = x_TH.shape
    x_tiles = _empty_tiles(x_TH, padded, columns, e4m3)
    where = (*map(_at, (x_TH, x_tiles, plan.places)), columns, slots)
    if e4m3:
        kernel("rows_fp8", "quantize")(_Quantize(*where, _DTYPES[x_TH.dtype]), (tokens, -(-columns // 4096)), 256)
    else:
        kernel("rows", "spread")(_Spread(*where), (tokens,), 256)
    return x_tiles


def _rows_in_tiles(rows: Rows) -> int:
    """Rows that tiles need room for at most: an expert's are a multiple of 8."""
    routed = rows.ids_TA.numel()
    return routed + 7 * min(rows.experts, routed)


def _empty_tiles(beside: Tensor, rows: int, columns: int, e4m3: bool) -> Tensor:
    """Room for so many rows: in bfloat16 in tiles of 64 columns, or in E4M3 in tiles of 128, and their scales."""
    if e4m3:
        return beside.new_empty(rows, -(-columns // 128) * _E4M3_TILE, dtype=torch.uint8)
    return beside.new_empty(rows, _round_up(columns, 64), dtype=torch.bfloat16)


def _gemm(
    matrix: Matrix, x: Tensor, out: Tensor, plan: Plan, rows: Rows | None,
    function: Function, slots: int, stages: int, buffers: int, item_rows: int,
) -> _Gemm:  # fmt: skip
    weights = rows.weights_TA if rows is not None and rows.weight_on_input else None
    return _Gemm(
        *map(_at, (matrix.codes, matrix.scales, matrix.bias, matrix.up_bias, matrix.scale, matrix.up_scale, x, out)),
        *map(_at, (plan.count, plan.items, plan.order, weights)), matrix.codes.shape[1],
        0 if matrix.scales is None else matrix.scales.shape[1],
        matrix.rows, matrix.columns, slots, stages, buffers, item_rows,
        function.number, 0 if matrix.bias is None else _DTYPES[matrix.bias.dtype] + 1,
        function.alpha, function.beta, function.limit,
    )  # fmt: skip


def _combine(y_RH: Tensor, rows: Rows, out_TH: Tensor, places: Tensor | None = None) -> None:
    tokens, slots = rows.ids_TA.shape
    columns = out_TH.shape[1]
    ids, weights = rows.ids_TA.contiguous(), None if rows.weight_on_input else rows.weights_TA.contiguous()
    args = _Combine(
        *map(_at, (y_RH, places, ids, weights, out_TH)), slots, columns, rows.first_expert, rows.experts,
        ids.dtype == torch.int64, _DTYPES[out_TH.dtype],
    )  # fmt: skip
    narrow = y_RH.dtype == torch.bfloat16
    kernel("rows", "combine_narrow" if narrow else "combine")(args, (tokens, -(-columns // 1024)), 128)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _eights(rows: int) -> int:
    return _round_up(rows, 8)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
