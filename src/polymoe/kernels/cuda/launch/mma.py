"""Calls with few rows per expert. GEMMs read rows of x by token, and y is float32, indexed by expanded row."""

from __future__ import annotations

from polymoe.kernels.cuda.launch.args import FewRowsArgs
from polymoe.kernels.cuda.launch.call import ByTokenCall, Regions
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.permutation import FEW_ROWS, permutation_bytes

__all__ = ["FewRowsCall", "MmaCall"]


class FewRowsCall(ByTokenCall):
    """Calls whose GEMMs sort few expanded rows by themselves, so that a call has three launches: see
    :data:`.permutation.FEW_ROWS`."""

    with_inverse = False
    y_bytes = 4
    gemm_args = FewRowsArgs

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        self._sorts = tokens * top_k <= FEW_ROWS
        for gemm in (self.gate_up, self.down):
            gemm.rows, gemm.ids, gemm.experts = tokens * top_k, None, self.layer.experts
        if self._sorts:
            self._launches = self._after_x

    def _set_ids(self, ids: int) -> None:
        super()._set_ids(ids)
        if self._sorts:
            self.gate_up.ids = self.down.ids = ids

    def _set_kinds(self, x: int, out: int, long_ids: bool, first_expert: int) -> None:
        super()._set_kinds(x, out, long_ids, first_expert)
        for gemm in (self.gate_up, self.down):
            gemm.long_ids, gemm.first_expert = long_ids, first_expert


class MmaCall(FewRowsCall):
    """Calls of the families w4a16_mma, w4a16_mma_ordered and w8a16_mma."""

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for h in bfloat16 and y in float32; x is not copied."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, False)
        return Regions(permutation, 0, rows * layer.down.k * 2, rows * layer.down.n * 4)
