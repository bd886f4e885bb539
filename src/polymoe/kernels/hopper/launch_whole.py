"""One call of the Hopper kernels for weights that the matrix units read as they are: buffers, arguments, launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polymoe.kernels.hopper import launch
from polymoe.kernels.hopper.launch import SHARED_BYTES, Function, Matrix, Rows

__all__ = ["WHOLE", "Shape", "whole"]

_MOST_STAGES = 16  # whole.cuh: kMostStages


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a kernel: warpgroups that multiply, groups of 64 rows each, times 128 bytes of a row in a stage."""

    warpgroups: int
    groups: int
    blocks: int

    def stage_bytes(self, rows: int) -> int:
        """Bytes of a stage for items of ``rows`` rows (whole.cuh: Stage)."""
        return self.blocks * (self.warpgroups * self.groups * 64 + rows) * 128


WHOLE = {32: Shape(2, 1, 2), 64: Shape(2, 1, 2), 128: Shape(2, 2, 1), 256: Shape(2, 1, 1)}
"""Kernels by the most rows of x of an item."""


def whole(
    up: Matrix, down: Matrix, gated: bool, function: Function, x_TH: Tensor, rows: Rows, out_TH: Tensor, block: int
) -> None:
    """``out_TH`` of bfloat16 x, in items of at most ``block`` rows."""
    tokens, slots = rows.ids_TA.shape
    routed = tokens * slots
    padded = routed + 7 * min(rows.experts, routed)  # an expert's rows in tiles: a multiple of 8
    shape = WHOLE[block]
    stage = shape.stage_bytes(block)
    stages = min((SHARED_BYTES - 1024) // stage, _MOST_STAGES)
    plan = launch._dispatch(rows, block, places=True)
    x_tiles = launch._spread(x_TH, plan, padded, slots)
    h_tiles = x_TH.new_empty(padded, launch._round_up(down.columns, 64))
    y_RH = x_TH.new_empty(routed, down.rows)
    grid = (torch.cuda.get_device_properties(x_TH.device).multi_processor_count,)
    for name, matrix, x, out in (("up", up, x_tiles, h_tiles), ("down", down, h_tiles, y_RH)):
        kind = name if name == "down" else "gated" if gated else "plain"
        gemm = launch._gemm(matrix, x, out, plan, rows if name == "up" else None, function, 0, stages, 1, block)
        kernel = launch.kernel(f"whole_{matrix.format}", f"whole_{kind}_{block}")
        kernel(gemm, grid, shape.warpgroups * 128 + 128, stages * stage + 1024)
    launch._combine(y_RH, rows, out_TH, plan.places)
