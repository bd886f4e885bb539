"""Calls with few rows per expert. GEMMs read rows of x by token, and y is float32, indexed by expanded row."""

from __future__ import annotations

from polymoe.kernels.cuda.launch.args import GemmArgs
from polymoe.kernels.cuda.launch.call import Call, Regions
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.permutation import permutation_bytes

__all__ = ["MmaCall"]


class MmaCall(Call):
    """Calls of the family w4a16_mma."""

    with_inverse = False
    y_bytes = 4

    @staticmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes for h in bfloat16 and y in float32; x is not copied."""
        rows = tokens * top_k
        permutation = permutation_bytes(rows, layer.experts, block_m, False)
        return Regions(permutation, 0, rows * layer.down.k * 2, rows * layer.down.n * 4)

    @property
    def x_args(self) -> GemmArgs:
        """Arguments of the first GEMM."""
        return self.gate_up

    def _prepare_x(self) -> None:
        """There is no launch for x."""

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        self.gate_up.top_k = top_k  # x is indexed by token
