"""Calls whose first GEMM gathers E4M3 rows of x by token. A row is its codes, then a scale for each 128 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import QuantizeRowsArgs
from polymoe.kernels.cuda.launch.call import Call, Regions
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.permutation import permutation_bytes
from polymoe.kernels.cuda.launch.tiled import e4m3_tile_bytes, padded_rows
from polymoe.kernels.cuda.sizes import FamilySizes, e4m3_row_bytes, round_up

__all__ = ["E4M3RowsCall", "E4M3TilesCall"]

_COLUMNS_PER_THREAD, _MOST_THREADS = 16, 512


class E4M3RowsCall(Call):
    """Calls of the family w8a8_f16. h is stored in rows, as x is."""

    quantize = "quantize_rows"
    """Name of the kernel that rounds x."""

    def __init__(
        self, layer: Layer, family: FamilySizes, block_m: int, block_n: int = 0, down_block_m: int = 0
    ) -> None:
        super().__init__(layer, family, block_m, block_n, down_block_m)
        self._x_args = QuantizeRowsArgs(columns=layer.up.k)
        self._threads = min(_MOST_THREADS, round_up(layer.up.k // _COLUMNS_PER_THREAD, 32))
        self._x_launch = modules.kernel("quantize", self.quantize, layer.target).prepare(self._x_args, self._threads)

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for x by token, h by permuted row, and y in bfloat16 by permuted row."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, True)
        x, h = tokens * e4m3_row_bytes(layer.up.k), rows * e4m3_row_bytes(layer.down.k)
        return Regions(permutation, x, h, rows * layer.down.n * 2)

    @property
    def x_args(self) -> QuantizeRowsArgs:
        """Arguments of the launch that rounds x."""
        return self._x_args

    def x_launch(self, tokens: int, top_k: int) -> Launch:
        """Return the launch that rounds each token's row."""
        self._x_launch.set_grid(tokens, -(-self.layer.up.k // (_COLUMNS_PER_THREAD * self._threads)))
        return self._x_launch

    def set_x_dtype(self, number: int) -> None:
        """Set the dtype of x; every dtype of :data:`.args.DTYPES` is supported."""
        self._x_args.x_dtype = number

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        self.gate_up.top_k = top_k  # x is indexed by token

    @classmethod
    def rows_of(cls, codes_TH: Tensor, scales_TG: Tensor) -> Tensor:
        """Return quantized x as the first GEMM reads it: uint8 [T, row bytes].

        Args:
            codes_TH: float8_e4m3fn.
            scales_TG: float32, one for each 128 columns.
        """
        tokens, columns = codes_TH.shape
        codes = cls.order(codes_TH.view(torch.uint8))
        scales = scales_TG.contiguous().view(torch.uint8)
        rows = torch.empty(tokens, e4m3_row_bytes(columns), dtype=torch.uint8, device=codes.device)
        rows[:, :columns] = codes
        rows[:, columns : columns + scales.shape[1]] = scales
        return rows

    @staticmethod
    def order(codes_TH: Tensor) -> Tensor:
        """Return the codes [T, H] in the order in which rows store them; here it is the natural order."""
        return codes_TH


class E4M3TilesCall(E4M3RowsCall):
    """Calls of the family w8a8. Codes of x are in the order of the MMA's operand, and h is in permuted tiles."""

    quantize = "quantize_rows_paired"

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for x by token, h in tiles, and y in bfloat16 by permuted row."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, True)
        h = e4m3_tile_bytes(padded_rows(layer.experts, rows), layer.down.k)
        return Regions(permutation, tokens * e4m3_row_bytes(layer.up.k), h, rows * layer.down.n * 2)

    @staticmethod
    def order(codes_TH: Tensor) -> Tensor:
        """Return the codes with each 16 columns permuted: for t from 0 to 3, columns 2t, 2t + 1, 2t + 8 and 2t + 9."""
        return codes_TH.unflatten(1, (-1, 2, 4, 2)).transpose(2, 3).flatten(1)
