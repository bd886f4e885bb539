"""Layouts of FlashInfer's kernels: the checkpoint's codes and scales, moved to where each kernel reads them.

Only bytes and bits move, so that every layout has an exact inverse. FlashInfer's own helpers quantize BF16 weights for
most of its kernels; nothing is quantized here.

``flashinfer_sm90`` and ``flashinfer_sm90_folded`` serve the CUTLASS kernels for MXFP4 weights and BF16 rows on SM90:
versions 0.6.14 to 0.6.17, and 0.6.18 and newer. Rows are up, then gate. Both cut a matrix into 16 rows by 64 columns
and mix rows r and r + 8, because a thread of ``wgmma`` has both.

* Codes of the former: take bytes ``16q + 8m + 4s + t`` of rows r and r + 8 (q, m, s: 0 or 1; t: 0 to 3). Their low
  nibbles become byte ``16q + 4t + 2s`` of row ``r + 8m``, with row r in the lower half, and their high nibbles the byte
  after it.
* Codes of the latter: the four bytes of s = 0 and 1 of both rows become one word, bytes 16q + 4t to 16q + 4t + 3 of row
  r + 8m, whose bits are scattered (:data:`FOLDED_BITS`) so that shifts and masks turn it into BF16.
* Scales of the former are [K/128, N * 4]: the four scales of 128 columns, row after row. Those of the latter are
  [N/64, K/128, 16, 16]: 16 bytes are the four scales of rows r, r + 16, r + 32 and r + 48 of 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats import FORMATS, Encoding, QuantTensor
from polymoe.layouts.cuda.bits import inverse, move_bits
from polymoe.layouts.cuda.matrices import MatrixLayout
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

FOLDED_BITS = (
    *(6, 7, 8, 15, 22, 23, 24, 31), *(3, 4, 5, 12, 19, 20, 21, 28),
    *(0, 1, 2, 9, 16, 17, 18, 25), *(13, 10, 11, 14, 29, 26, 27, 30),
)  # fmt: skip
"""Where the bits of a word of ``flashinfer_sm90_folded`` lie; its bytes are those of rows r, r + 8, r and r + 8."""

_MXFP4 = FORMATS["mxfp4"].encoding


@dataclass(frozen=True, slots=True)
class FlashInferSM90(MatrixLayout):
    """MXFP4 weights for FlashInfer's CUTLASS kernels on SM90.

    Attributes:
        folded: whether in the order of versions 0.6.18 and newer.
    """

    folded: bool = False
    multiple: ClassVar[int] = 128
    group_rows: ClassVar[int] = 1

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        reasons.need(encoding == _MXFP4, f"{projection} weights", "mxfp4", encoding.name)

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        return rows * columns // 32

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return codes [N, K/2] and scales of the matrix, both uint8, and no limit on scales."""
        up_first = halves[::-1]
        codes_NB = torch.cat([q.codes for q in up_first])
        scales_NG = torch.cat([_bytes(q.scales) for q in up_first])
        pack_scales = _fold_scales if self.folded else _flatten_scales
        pack_codes = _mix_words if self.folded else _mix_nibbles
        return {"codes": pack_codes(codes_NB), "scales": pack_scales(scales_NG)}, None

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        codes = (_separate_words if self.folded else _separate_nibbles)(parts["codes"])
        scales = (_unfold_scales if self.folded else _unflatten_scales)(parts["scales"])
        split = (x.unflatten(1, (halves, -1)).unbind(1)[::-1] for x in (codes, scales))
        return [{"codes": c.flatten(0, 1), "scales": s.flatten(0, 1)} for c, s in zip(*split, strict=True)]


def _bytes(scales: Tensor | None) -> Tensor:
    assert scales is not None
    return scales.contiguous().view(torch.uint8)


def _lanes(codes_NB: Tensor, lanes: tuple[int, ...]) -> Tensor:
    """Split [..., N, K/2] into blocks: [..., blocks of rows, h, r, blocks of columns, *lanes]."""
    x = codes_NB.unflatten(-1, (-1, *lanes))
    return x.unflatten(codes_NB.dim() - 2, (-1, 2, 8))


def _mix_nibbles(codes_NB: Tensor) -> Tensor:
    low, high = _lanes(codes_NB, (2, 2, 2, 4)).unbind(1)  # rows r and r + 8: [rows, r, columns, q, m, s, t]
    both = torch.stack([low & 15 | high << 4, low >> 4 | high & 240], -1)  # columns 2t and 2t + 1
    return both.permute(0, 4, 1, 2, 3, 6, 5, 7).reshape(codes_NB.shape)


def _separate_nibbles(packed: Tensor) -> Tensor:
    """The inverse of :func:`_mix_nibbles` for [experts, N, K/2]."""
    x = _lanes(packed, (2, 4, 2, 2))  # [experts, rows, m, r, columns, q, t, s, n]
    even, odd = x.permute(0, 1, 3, 4, 5, 2, 7, 6, 8).unbind(-1)
    rows = torch.stack([even & 15 | odd << 4, even >> 4 | odd & 240], 2)
    return rows.reshape(packed.shape)


def _mix_words(codes_NB: Tensor) -> Tensor:
    x = _lanes(codes_NB, (2, 2, 2, 4))  # [rows, h, r, columns, q, m, s, t]
    words = move_bits(x.permute(0, 5, 2, 3, 4, 7, 6, 1).flatten(6), FOLDED_BITS)
    return words.reshape(codes_NB.shape)


def _separate_words(packed: Tensor) -> Tensor:
    """The inverse of :func:`_mix_words` for [experts, N, K/2]."""
    words = _lanes(packed, (2, 4, 4))  # [experts, rows, m, r, columns, q, t, byte]
    x = move_bits(words, inverse(FOLDED_BITS)).unflatten(-1, (2, 2))  # s, h
    return x.permute(0, 1, 8, 3, 4, 5, 2, 7, 6).reshape(packed.shape)


def _flatten_scales(scales_NG: Tensor) -> Tensor:
    return scales_NG.unflatten(1, (-1, 4)).transpose(0, 1).flatten(1)


def _unflatten_scales(packed: Tensor) -> Tensor:
    return packed.unflatten(2, (-1, 4)).transpose(1, 2).flatten(2)


def _fold_scales(scales_NG: Tensor) -> Tensor:
    return scales_NG.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 16)).permute(0, 3, 2, 1, 4).flatten(3)


def _unfold_scales(packed: Tensor) -> Tensor:
    return packed.unflatten(4, (4, 4)).permute(0, 1, 4, 3, 2, 5).flatten(4).flatten(1, 3)
