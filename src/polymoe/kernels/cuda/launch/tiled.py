"""Calls whose GEMMs copy permuted tiles of x and h in bulk: bfloat16, or E4M3 with a scale for each 128 columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import PermuteArgs, QuantizePermutedArgs
from polymoe.kernels.cuda.launch.call import ByTokenCall, Call, Regions
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.permutation import permutation_bytes
from polymoe.kernels.cuda.sizes import E4M3_BLOCK_K, E4M3_ROW_BYTES, TILE_ROWS, round_up

__all__ = ["GatheredCall", "QuantizedTilesCall", "TiledCall", "WgmmaCall", "e4m3_tile_bytes", "padded_rows"]

_THREADS, _QUANTIZE_COLUMNS = 256, 4096  # per CTA


def padded_rows(experts: int, rows: int) -> int:
    """Return the most rows that permuted tiles can have: each expert's rows are padded to a multiple of 8."""
    return rows + (TILE_ROWS - 1) * min(experts, rows)


def e4m3_tile_bytes(rows: int, columns: int) -> int:
    """Return the bytes of ``rows`` rows in E4M3 tiles of 128 columns, with their scales."""
    return rows * -(-columns // E4M3_BLOCK_K) * E4M3_ROW_BYTES


class TiledCall(Call):
    """Calls of the w4a16 and w8a16 families for many rows per expert. Tiles have 64 columns of bfloat16."""

    x_by_permuted_row = True

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for x and h in tiles, and y in bfloat16 by permuted row."""
        rows = tokens * top_k
        padded = padded_rows(layer.experts, rows)
        x, h = (padded * round_up(k, 64) * 2 for k in (layer.up.k, layer.down.k))
        return Regions(permutation_bytes(rows, layer.experts, block_m, True), x, h, rows * layer.down.n * 2)

    @property
    def x_args(self) -> Any:
        """Arguments of the launch that copies x."""
        return self._x_args

    def x_launch(self, tokens: int, top_k: int) -> Launch | None:
        """Return the launch that copies each token's row once for each of its experts."""
        self._x_args.top_k = top_k
        self._x_launch.set_grid(tokens)
        return self._x_launch

    def _prepare_x(self) -> None:
        self._x_args: Any = PermuteArgs(columns=self.layer.up.k)
        self._x_launch = modules.kernel("permute", "permute_x", self.layer.target).prepare(self._x_args, _THREADS)


class WgmmaCall(TiledCall):
    """Calls of w4a16_wgmma and w8a16_wgmma. The first GEMM gathers rows of x by token where it has few tiles along N,
    each of which gathers them again. Otherwise a launch copies each row once for each of a token's experts."""

    most_gathered_n: Mapping[int, int] = MappingProxyType({32: 1024, 64: 768, 128: 768})
    """Most rows of weights with which the first GEMM gathers, by ``block_m``: two or three tiles, and with 256 none."""

    @staticmethod
    def gathers(layer: Layer, block_m: int) -> bool:
        """Return whether the first GEMM gathers rows of x, and with it that of narrow work tiles."""
        return layer.up.n <= WgmmaCall.most_gathered_n.get(block_m, 0)

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """As :meth:`TiledCall.regions`, without x if its rows are gathered."""
        regions = TiledCall.regions(layer, block_m, tokens, top_k)
        return regions._replace(x=0) if WgmmaCall.gathers(layer, block_m) else regions

    def x_launch(self, tokens: int, top_k: int) -> Launch | None:
        """Return the launch that copies rows of x; None if they are gathered."""
        return None if self._gathers else super().x_launch(tokens, top_k)

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        for gate_up in (self.gate_up, *self._narrow[:1]):
            gate_up.top_k = top_k if self._gathers else 0

    def set_x(self, x: int) -> None:
        """See :meth:`Call.set_x`."""
        if not self._gathers:
            super().set_x(x)
            return
        for gate_up in (self.gate_up, *self._narrow[:1]):
            gate_up.x = x

    @property
    def _gathers(self) -> bool:
        return self.gathers(self.layer, self.permutation.args.block_m)


class GatheredCall(ByTokenCall):
    """Calls of the family bf16. Its first GEMM reads rows of x by token; h is in tiles of 64 columns."""

    even_tiles = True

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for h in tiles, and y in bfloat16 by permuted row; x is not copied."""
        rows = tokens * top_k
        h = padded_rows(layer.experts, rows) * round_up(layer.down.k, 64) * 2
        return Regions(permutation_bytes(rows, layer.experts, block_m, True), 0, h, rows * layer.down.n * 2)


class QuantizedTilesCall(TiledCall):
    """Calls of the family w4a8. Tiles have 128 columns of E4M3."""

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for x and h in tiles, and y in bfloat16 by permuted row."""
        rows = tokens * top_k
        padded = padded_rows(layer.experts, rows)
        x, h = (e4m3_tile_bytes(padded, k) for k in (layer.up.k, layer.down.k))
        return Regions(permutation_bytes(rows, layer.experts, block_m, True), x, h, rows * layer.down.n * 2)

    def x_launch(self, tokens: int, top_k: int) -> Launch:
        """Return the launch that rounds each token's row once, and writes it once for each of its experts."""
        self._x_args.top_k = top_k
        self._x_launch.set_grid(tokens, -(-self.layer.up.k // _QUANTIZE_COLUMNS))
        return self._x_launch

    def set_x_dtype(self, number: int) -> None:
        """Set the dtype of x; every dtype of :data:`.args.DTYPES` is supported."""
        self._x_args.x_dtype = number

    def _prepare_x(self) -> None:
        self._x_args = QuantizePermutedArgs(columns=self.layer.up.k)
        kernel = modules.kernel("quantize", "quantize_permuted", self.layer.target)
        self._x_launch = kernel.prepare(self._x_args, _THREADS)
