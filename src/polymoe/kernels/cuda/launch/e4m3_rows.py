"""Calls whose first GEMM gathers E4M3 rows of x by token. A row is its codes, then a scale for each 128 columns or one
for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import (
    E4M3_ROWS,
    GemmArgs,
    QuantizePermutedArgs,
    QuantizeRowsArgs,
    QuantizeWholeRowsArgs,
    RoundingArgs,
    dtype_number,
)
from polymoe.kernels.cuda.launch.call import ALIGNMENT, Call, Regions
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.mma import FewRowsCall
from polymoe.kernels.cuda.launch.permutation import permutation_bytes
from polymoe.kernels.cuda.launch.tiled import e4m3_tile_bytes, padded_rows
from polymoe.kernels.cuda.sizes import e4m3_row_bytes, round_up

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ChannelMmaCall", "ChannelRowsCall", "ChannelTilesCall", "E4M3MmaCall", "E4M3RowsCall", "E4M3TilesCall",
    "RowTilesCall",
]  # fmt: skip

_COLUMNS_PER_THREAD, _MOST_THREADS, _THREADS = 16, 512, 256

_TILES_TOP_K = 1
"""Most experts of a token with which w8a8 takes x in permuted tiles."""


class E4M3RowsCall(Call):
    """Calls of the family w8a8_f16. h is stored in rows, as x is."""

    takes_quantized_x = True
    quantize = "quantize_rows"
    """Name of the kernel that rounds x."""

    def _prepare_x(self) -> None:
        layer = self.layer
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
    def x_args(self) -> QuantizeRowsArgs | QuantizePermutedArgs | QuantizeWholeRowsArgs | GemmArgs:
        """Arguments of the launch that rounds x."""
        return self._x_args

    def x_launch(self, tokens: int, top_k: int) -> Launch | None:
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
            scales_TG: float32, one for each 128 columns, or one.
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


class E4M3MmaCall(FewRowsCall, E4M3RowsCall):
    """Calls of the family w8a8_mma. GEMMs round rows of x and h by themselves; h and y are float32, indexed by expanded
    row.
    """

    gemm_args = RoundingArgs
    quantized_x_dtype = E4M3_ROWS

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for h and y in float32; x is not copied."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, False)
        return Regions(permutation, 0, rows * layer.down.k * 4, rows * layer.down.n * 4)

    def x_launch(self, tokens: int, top_k: int) -> None:
        """There is none."""

    def set_x_dtype(self, number: int) -> None:
        """Set the dtype of x; every dtype of :data:`.args.DTYPES` is supported, and :data:`.args.E4M3_ROWS`."""
        self.gate_up.x_dtype = number


class E4M3TilesCall(E4M3RowsCall):
    """Calls of the family w8a8. Codes of x are in the order of the MMA's operand, and h is in permuted tiles.

    Where a token has one expert, x is in permuted tiles as well, which the first GEMM copies in bulk: with more, tiles
    have more bytes than x. x that comes quantized is by token.
    """

    quantize = "quantize_rows_paired"

    def _prepare_x(self) -> None:
        super()._prepare_x()
        self._in_tiles = False
        self._tiles_args = QuantizePermutedArgs(columns=self.layer.up.k)
        kernel = modules.kernel("quantize", "quantize_permuted_paired", self.layer.target)
        self._tiles_launch = kernel.prepare(self._tiles_args, _THREADS)
        block_m = self.permutation.args.block_m
        _, self._gate_up_tiles = self._gemm("gate_up_tiles", self.layer.up, block_m, self.gate_up)

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for x by token or in tiles, h in tiles, and y in bfloat16 by permuted row."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, True)
        padded = padded_rows(layer.experts, rows)
        x = e4m3_tile_bytes(padded, layer.up.k) if top_k <= _TILES_TOP_K else tokens * e4m3_row_bytes(layer.up.k)
        return Regions(permutation, x, e4m3_tile_bytes(padded, layer.down.k), rows * layer.down.n * 2)

    @property
    def x_args(self) -> QuantizeRowsArgs | QuantizePermutedArgs:
        """Arguments of the launch that rounds x."""
        return self._tiles_args if self._in_tiles else self._x_args

    def x_launch(self, tokens: int, top_k: int) -> Launch | None:
        """Return the launch that rounds each token's row."""
        if not self._in_tiles:
            return super().x_launch(tokens, top_k)
        self._tiles_args.top_k = top_k
        self._tiles_launch.set_grid(tokens, -(-self.layer.up.k // (_COLUMNS_PER_THREAD * _THREADS)))
        return self._tiles_launch

    def set_x_dtype(self, number: int) -> None:
        """Set the dtype of x; every dtype of :data:`.args.DTYPES` is supported."""
        self._x_args.x_dtype = self._tiles_args.x_dtype = number

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        self._in_tiles = self.x_by_permuted_row = top_k <= _TILES_TOP_K
        super().resize(tokens, top_k)
        if self._in_tiles:  # after x that comes quantized, the other one runs
            gathers = self._gemms[0]
            self._launches = tuple(self._gate_up_tiles if launch is gathers else launch for launch in self._launches)

    @staticmethod
    def order(codes_TH: Tensor) -> Tensor:
        """Return the codes in the order of the MMA's operand."""
        return _paired(codes_TH)


class ChannelRowsCall(E4M3RowsCall):
    """Calls of the family w8a8_f16_channel. The first GEMM stores h as float32, and a launch rounds its rows as those
    of x. With static scales, which are those of experts, x is by permuted row."""

    quantize = "quantize_whole_rows"

    def _prepare_x(self) -> None:
        layer = self.layer
        up, down = layer.up, layer.down
        self.x_by_permuted_row = up.input_scale is not None
        self._x_args = QuantizeWholeRowsArgs(columns=up.k, first_expert=layer.first_expert)
        self._h_args = QuantizeWholeRowsArgs(
            columns=down.k, x_dtype=dtype_number(torch.float32), first_expert=layer.first_expert
        )
        self._x_launch, self._h_launch = map(self._prepare_rows, (self._x_args, self._h_args))
        if up.input_scale is not None and down.input_scale is not None:
            self._x_args.input_scales = up.input_scale.data_ptr()
            self._h_args.input_scales = down.input_scale.data_ptr()

    def _prepare_rows(self, args: QuantizeWholeRowsArgs) -> Launch:
        args.threads = min(_MOST_THREADS, round_up(args.columns // _COLUMNS_PER_THREAD, 32))
        kernel = modules.kernel("quantize", self.quantize, self.layer.target)
        return kernel.prepare(args, args.threads * _rows_per_cta(args))

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for x by token or by permuted row, h in float32 and then in E4M3, and y in bfloat16, both by
        permuted row."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, True)
        x = (tokens if layer.up.input_scale is None else rows) * e4m3_row_bytes(layer.up.k)
        h = _float32_bytes(rows, layer.down.k) + rows * e4m3_row_bytes(layer.down.k)
        return Regions(permutation, x, h, rows * layer.down.n * 2)

    def x_launch(self, tokens: int, top_k: int) -> Launch:
        """Return the launch that rounds each token's row, with static scales once for each of its experts."""
        args = self._x_args
        args.top_k, args.rows = top_k, tokens * top_k if self.x_by_permuted_row else tokens
        self._x_launch.set_grid(-(-args.rows // _rows_per_cta(args)))
        return self._x_launch

    def h_launch(self, rows: int) -> Launch:
        """Return the launch that rounds rows of h."""
        self._h_args.rows = rows
        self._h_launch.set_grid(-(-rows // _rows_per_cta(self._h_args)))
        return self._h_launch

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        h = self.regions(self.layer, self.permutation.args.block_m, tokens, top_k).offsets()[0].h
        inverse = self.permutation.offsets["expanded_to_permuted"]
        rounded = h + _float32_bytes(tokens * top_k, self.layer.down.k)
        self._in_workspace += [
            (self._h_args, "x", h),
            (self._h_args, "out", rounded),
            (self._h_args, "expanded_to_permuted", inverse),
            (self.down, "x", rounded),
        ]
        if self.x_by_permuted_row:
            self.gate_up.top_k = 0

    def _set_ids(self, ids: int) -> None:
        super()._set_ids(ids)
        self._x_args.ids = self._h_args.ids = ids

    def _set_kinds(self, x: int, out: int, long_ids: bool, first_expert: int) -> None:
        super()._set_kinds(x, out, long_ids, first_expert)
        for args in (self._x_args, self._h_args):
            args.long_ids, args.first_expert = long_ids, first_expert


class ChannelTilesCall(ChannelRowsCall):
    """Calls of the family w8a8_channel. Codes of x and h are in the order of the MMA's operand, and h is in permuted
    tiles."""

    quantize = "quantize_whole_rows_paired"

    def _prepare_x(self) -> None:
        super()._prepare_x()
        self._h_args.tiles = True

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for the same, with h in float32 and then in tiles."""
        rows = tokens * top_k
        tiles = e4m3_tile_bytes(padded_rows(layer.experts, rows), layer.down.k)
        h = _float32_bytes(rows, layer.down.k) + tiles
        return ChannelRowsCall.regions(layer, block_m, tokens, top_k)._replace(h=h)

    @staticmethod
    def order(codes_TH: Tensor) -> Tensor:
        """Return the codes in the order of the MMA's operand."""
        return _paired(codes_TH)


class RowTilesCall(ChannelTilesCall):
    """Calls of the family w4a8_rows. x is in permuted tiles, too, where a launch writes a token's row once for each of
    its experts."""

    takes_quantized_x = False
    quantize = "quantize_row_tiles"

    def _prepare_x(self) -> None:
        super()._prepare_x()
        self.x_by_permuted_row = True

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for the same, with x in tiles."""
        x = e4m3_tile_bytes(padded_rows(layer.experts, tokens * top_k), layer.up.k)
        return ChannelTilesCall.regions(layer, block_m, tokens, top_k)._replace(x=x)

    def x_launch(self, tokens: int, top_k: int) -> Launch:
        """Return the launch that rounds each token's row, with static scales once for each of its experts."""
        launch, args = super().x_launch(tokens, top_k), self._x_args
        if not args.input_scales:
            args.rows = tokens
            launch.set_grid(-(-tokens // _rows_per_cta(args)))
        return launch

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        rounded = next(at for args, name, at in self._in_workspace[::-1] if args is self.down and name == "x")
        self._in_workspace += [(down, "x", rounded) for down in self._narrow[1:]]


class ChannelMmaCall(E4M3MmaCall):
    """Calls of the family w8a8_mma_channel, which are those of w8a8_mma with other scales."""

    def _prepare_x(self) -> None:
        super()._prepare_x()
        for gemm, matrix in ((self.gate_up, self.layer.up), (self.down, self.layer.down)):
            if matrix.input_scale is not None:
                gemm.input_scales = matrix.input_scale.data_ptr()


def _rows_per_cta(args: QuantizeWholeRowsArgs) -> int:
    return max(1, _THREADS // args.threads)


def _float32_bytes(rows: int, columns: int) -> int:
    return round_up(rows * columns * 4, ALIGNMENT)


def _paired(codes_TH: Tensor) -> Tensor:
    """Return the codes with each 16 columns permuted: for t from 0 to 3, columns 2t, 2t + 1, 2t + 8 and 2t + 9."""
    return codes_TH.unflatten(1, (-1, 2, 4, 2)).transpose(2, 3).flatten(1)
