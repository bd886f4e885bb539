"""Calls whose first GEMM gathers E4M3 rows of x by token. A row is its codes, then a scale for each 128 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import E4M3_ROWS, FewRowsArgs, GemmArgs, QuantizeRowsArgs
from polymoe.kernels.cuda.launch.call import Call, Regions
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.permutation import FEW_ROWS, permutation_bytes
from polymoe.kernels.cuda.launch.tiled import e4m3_tile_bytes, padded_rows
from polymoe.kernels.cuda.sizes import FamilySizes, e4m3_row_bytes, round_up

__all__ = ["E4M3MmaCall", "E4M3RowsCall", "E4M3TilesCall"]

_COLUMNS_PER_THREAD, _MOST_THREADS = 16, 512


class E4M3RowsCall(Call):
    """Calls of the family w8a8_f16. h is stored in rows, as x is."""

    quantize = "quantize_rows"
    """Name of the kernel that rounds x."""

    def __init__(
        self,
        layer: Layer,
        family: FamilySizes,
        block_m: int,
        block_n: int = 0,
        down_block_m: int = 0,
        narrow_m: int = 0,
    ) -> None:
        super().__init__(layer, family, block_m, block_n, down_block_m, narrow_m)
        self._prepare_x()

    def _prepare_x(self) -> None:
        """Prepare the launch that rounds x."""
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
    def x_args(self) -> QuantizeRowsArgs | GemmArgs:
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


class E4M3MmaCall(E4M3RowsCall):
    """Calls of the family w8a8_mma. GEMMs round rows of x and h by themselves; h and y are float32, indexed by expanded
    row. With few expanded rows GEMMs also sort these, so that a call has three launches.
    """

    with_inverse = False
    y_bytes = 4
    gemm_args = FewRowsArgs

    def _prepare_x(self) -> None:
        for gemm in (self.gate_up, self.down):
            gemm.experts = self.layer.experts

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for h and y in float32; x is not copied."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, False)
        return Regions(permutation, 0, rows * layer.down.k * 4, rows * layer.down.n * 4)

    @property
    def x_args(self) -> GemmArgs:
        """Arguments of the first GEMM."""
        return self.gate_up

    def x_launch(self, tokens: int, top_k: int) -> None:
        """There is none."""

    def set_x_dtype(self, number: int) -> None:
        """Set the dtype of x; every dtype of :data:`.args.DTYPES` is supported, and :data:`.args.E4M3_ROWS`."""
        self.gate_up.x_dtype = number

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        self._sorts = tokens * top_k <= FEW_ROWS
        for gemm in (self.gate_up, self.down):
            gemm.rows, gemm.ids = tokens * top_k, None
        if self._sorts:
            self._launches = self._after_x

    def run(
        self,
        x: int,
        ids: int,
        router_weights: int,
        out: int,
        workspace: int,
        stream: int,
        kinds: tuple[int, int, bool, int],
        *,
        quantized_x: bool = False,
    ) -> None:
        """See :meth:`Call.run`."""
        if self._sorts:
            self.gate_up.ids = self.down.ids = ids
        if quantized_x:
            kinds = (E4M3_ROWS, *kinds[1:])
        super().run(x, ids, router_weights, out, workspace, stream, kinds)

    def _set_kinds(self, x: int, out: int, long_ids: bool, first_expert: int) -> None:
        super()._set_kinds(x, out, long_ids, first_expert)
        for gemm in (self.gate_up, self.down):
            gemm.long_ids, gemm.first_expert = long_ids, first_expert


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
