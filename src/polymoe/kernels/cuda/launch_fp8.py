"""One call of the Hopper kernels for E4M3 weights and rows (fp8.cuh, and w8a8.cuh for many rows)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from polymoe.kernels.cuda import launch
from polymoe.kernels.cuda.launch import Function, Matrix, Plan, Rows

__all__ = ["FP8", "W8A8", "fp8", "w8a8"]

FP8 = (32, 64, 96)
"""Kernels that convert both sides to float16, by the most rows of x of an item."""

W8A8 = (160,)
"""Kernels that multiply E4M3 as it is."""

_THREADS, _ROWS, _MOST_STAGES = 384, 256, 16  # fp8_blocks.cuh: kThreads, rows of weights of a tile; kMostStages


class _QuantizeRows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int) for name in ("columns", "x_dtype")),
    )


def fp8(up: Matrix, down: Matrix, function: Function, x_TH: Tensor, rows: Rows, out_TH: Tensor, block: int) -> None:
    """``out_TH`` of x of any float dtype, in items of at most ``block`` rows.

    x and h are rounded to E4M3 with a scale for each row and 128 columns, ``amax / 448``.
    """
    plan = launch._dispatch(rows, block, places=True)
    x_rows = _quantize(x_TH)
    h_rows = x_rows.new_empty(rows.ids_TA.numel(), _row_bytes(down.columns))
    # x in float16; and what warps tell each other.
    ring = _ring(block * 256, 40, block)
    _products("fp8_block128", "fp8", up, down, function, x_rows, h_rows, rows, plan, out_TH, block, ring)


def w8a8(up: Matrix, down: Matrix, function: Function, x_TH: Tensor, rows: Rows, out_TH: Tensor, block: int) -> None:
    """The same where experts have many rows. Products are E4M3's own, which add 128 columns with 14 bits."""
    plan = launch._dispatch(rows, block, places=True)
    x_rows = _quantize(x_TH, in_pairs=True)
    h_tiles = launch._empty_tiles(x_rows, launch._rows_in_tiles(rows), down.columns, True)
    ring = _ring(block * 128, 12, block)
    _products("w8a8_fp8_block128", "w8a8", up, down, function, x_rows, h_tiles, rows, plan, out_TH, block, ring)


def _products(
    unit: str, kernels: str, up: Matrix, down: Matrix, function: Function, x_rows: Tensor, h: Tensor, rows: Rows,
    plan: Plan, out_TH: Tensor, block: int, ring: tuple[int, int],
) -> None:  # fmt: skip
    """Gate and up, down, and the weighted sum."""
    tokens, slots = rows.ids_TA.shape
    y_RH = torch.empty(tokens * slots, down.rows, dtype=torch.bfloat16, device=out_TH.device)
    grid = (torch.cuda.get_device_properties(out_TH.device).multi_processor_count,)
    stages, shared = ring
    for part, matrix, x, out, divisor in (("gated", up, x_rows, h, slots), ("down", down, h, y_RH, 0)):
        gemm = launch._gemm(matrix, x, out, plan, None, function, divisor, stages, 1, block)
        launch.kernel(unit, f"{kernels}_{part}_{block}")(gemm, grid, _THREADS, shared)
    launch._combine(y_RH, rows, out_TH, plan.places)


def _row_bytes(columns: int) -> int:
    """Of a row in E4M3 with its scales behind it (quantize.cuh: row_bytes)."""
    return columns + launch._round_up(columns // 32, 16)


def _quantize(x_TH: Tensor, in_pairs: bool = False) -> Tensor:
    """x in E4M3 with its scales: uint8 [T, bytes]; with ``in_pairs``, columns as w8a8.cuh wants them."""
    tokens, columns = x_TH.shape
    out = torch.empty(tokens, _row_bytes(columns), dtype=torch.uint8, device=x_TH.device)
    threads = min(512, launch._round_up(columns // 16, 32))
    args = _QuantizeRows(launch._at(x_TH), launch._at(out), columns, launch._DTYPES[x_TH.dtype])
    unit, name = ("w8a8_fp8_block128", "quantize_in_pairs") if in_pairs else ("fp8_block128", "quantize")
    launch.kernel(unit, name)(args, (tokens, -(-columns // (16 * threads))), threads)
    return out


def _ring(x_bytes: int, beside_bytes: int, block: int) -> tuple[int, int]:
    """Stages, and bytes of dynamic shared memory, for items of ``block`` rows (Stage in fp8.cuh and w8a8.cuh).

    Args:
        x_bytes: of x in a stage, beside which it has two scales for each row.
        beside_bytes: of static shared memory for each row.
        block: the most rows of an item.
    """
    stage = launch._round_up(_ROWS * 128 + x_bytes + block * 8, 1024)
    static = beside_bytes * block + 16 * (_MOST_STAGES + 1)  # and barriers
    room = launch.SHARED_BYTES + 2048 - static - 1024
    stages = min(room // stage, _MOST_STAGES)
    return stages, stages * stage + 1024
