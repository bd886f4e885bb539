"""Layouts of Humming's kernels: weights in the orders that these read for 16-bit activations.

Read from the source of humming-kernels 0.1.19 (``transform.py``, ``config/config.py``,
``include/humming/kernel/process.cuh``). The order is a permutation of the checkpoint's bits; nothing is rounded or
computed. Gate and up are one matrix, first all rows of the gate.

A tile of 64 rows and 16 columns lies as the operands of m16n8k16 MMAs: 32 lanes (row, pair of columns), each with the
codes of its four pairs of 8 rows. A word holds 8 codes of 4 bits, or 4 of 8 bits. ``humming_a16`` has them in the order
in which arithmetic converts two codes, 16 bits apart, to bfloat16. ``humming_a16_native`` has E2M1 and E4M3 codes in
the order of columns, as the conversion instructions of SM100 and newer read them, and INT4 as ``humming_a16`` does.

Scales of groups lie by group, then by row with each 8 x 8 rows of a tile transposed; scales of single rows in blocks of
32; scales of blocks as float32, transposed; scales of whole matrices as float32. Zero points lie as scales of groups
do, two in a byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polymoe.formats import Encoding, PerChannel, PerGroup, PerTensor, QuantTensor
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES
from polymoe.layouts.base import Packed, need_one_encoding
from polymoe.layouts.staging import expert_of, ordinary_tensors, pack_stacks, unchanged, unchanged_parts
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Reason, Reasons

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NATIVE_ELEMENTS", "HummingLayout"]

NATIVE_ELEMENTS = ("e2m1", "e4m3")
"""Elements that SM100 and newer convert to bfloat16 by instructions."""

_BLOCK = 128
"""Rows and columns must be multiples of this: the widest tile of a kernel, and the size of a block of scales."""


@dataclass(frozen=True, slots=True)
class HummingLayout:
    """Packs an expert as two matrices, ``up`` (gate and up) and ``down``, each with ``codes``, ``scales`` and
    ``zero_points``, uint8 [E, bytes]. ``{projection}.global_scale`` [E], biases and input scales are stored as in the
    natural layout.

    Attributes:
        name: in ``LAYOUTS``.
        native: whether codes lie as conversion instructions read them, where there is such an instruction.
    """

    name: str = "humming_a16"
    native: bool = False

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        """Return every reason why such experts cannot be packed; an empty tuple if they can."""
        reasons = Reasons()
        need_one_encoding(reasons, spec)
        for name, size in (("H", spec.hidden), ("F", spec.intermediate)):
            reasons.need(size % _BLOCK == 0, name, f"a multiple of {_BLOCK}", size)
        for projection, encoding in spec.encodings.items():
            self._check_encoding(reasons, projection, encoding)
        if scales is not None:
            reasons.need(not scales.outside_bfloat16, "scales", "positive, at most 2**25", scales)
        return tuple(reasons.found)

    def _check_encoding(self, reasons: Reasons, projection: str, e: Encoding) -> None:
        elements = ("e2m1", "int4", "e4m3")
        if not reasons.need(e.element in elements, f"{projection} elements", " or ".join(elements), e.element):
            return
        granularity = e.granularity
        what, got = f"{projection} scales", f"{granularity}, {e.scale_dtype}"
        if isinstance(granularity, PerGroup) and granularity.n == 1:
            reasons.need(granularity.k in (16, 32, 64, 128), what, "groups of 16 to 128 columns", got)
            dtypes = ("e8m0", "e4m3", "bfloat16")
        elif isinstance(granularity, PerGroup):
            square = granularity == PerGroup(_BLOCK, _BLOCK)
            reasons.need(square, what, f"blocks of {_BLOCK} x {_BLOCK}", got)
            dtypes = ("float32", "bfloat16", "e8m0")
        else:
            dtypes = ("bfloat16",) if isinstance(granularity, PerChannel) else ("float32", "bfloat16")
        reasons.need(e.scale_dtype in dtypes, what, " or ".join(dtypes), got)
        grouped = isinstance(granularity, PerGroup)
        reasons.need(not e.zero_points or grouped, f"{projection} zero points", "scales of groups", got)

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Return the bytes of the packed layer, without input scales and with biases of 2 bytes."""
        total = 2 * spec.bias_elements
        for projection, e in spec.encodings.items():
            rows, columns = spec.matrix_shape(projection)
            total += rows * columns * e.bits // 8 + (4 if e.global_scale else 0)
            assert e.granularity is not None
            grid_rows, grid_columns = e.granularity.scale_shape(rows, columns)
            total += grid_rows * grid_columns * SCALE_DTYPES.itemsize(_held_scale(e))
            total += grid_rows * grid_columns // 2 if e.zero_points else 0
        return spec.local_experts * total

    @ordinary_tensors()
    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Pack expert by expert; the computation runs on ``device``.

        Raises:
            PlanError: if ``out`` holds experts of another spec.
        """

        def parts(_: int, expert: Expert) -> dict[str, Tensor]:
            found = unchanged_parts(expert)
            for matrix, names in _matrices(weights.spec).items():
                packed = self._pack([expert.projections[name] for name in names])
                found |= {f"{matrix}.{name}": part for name, part in packed.items()}
            return found

        return Packed(self.name, weights.spec, pack_stacks(weights, device, out, parts))

    def unpack(self, packed: Packed) -> ExpertWeights:
        """Return the original weights, read lazily from ``packed``, one expert or several at a time."""
        spec = packed.spec

        def stacked(first: int, last: int) -> dict[str, Tensor]:
            some = {name: tensor[first:last] for name, tensor in packed.tensors.items()}
            found = unchanged(some)
            for matrix, names in _matrices(spec).items():
                mine = {n.partition(".")[2]: t for n, t in some.items() if n.startswith(f"{matrix}.")}
                rows, columns = spec.matrix_shape(matrix)
                whole = self._unpack(mine, spec.encodings[matrix], rows * len(names), columns)
                for part, tensor in whole.items():
                    halves = tensor.chunk(len(names), 1)
                    found |= {f"{name}.{part}": half for name, half in zip(names, halves, strict=True)}
            return found

        return ExpertWeights(spec, lambda e: expert_of(spec, stacked(e, e + 1), 0), read_stacked=stacked)

    def _native(self, e: Encoding) -> bool:
        return self.native and e.element in NATIVE_ELEMENTS

    def _pack(self, halves: Sequence[QuantTensor]) -> dict[str, Tensor]:
        """Pack gate and up, or one projection: uint8 [bytes] by name."""
        e = halves[0].encoding
        codes_NK = torch.cat([q.codes.view(torch.uint8) for q in halves])
        codes = (_pack_4bit if e.bits == 4 else _pack_8bit)(codes_NK, self._native(e))
        scales = [q.scales.to(_scale_dtype(e)) for q in halves if q.scales is not None]
        if _scale_dtype(e).itemsize == 1:  # torch has fewer operations for 8-bit floats
            scales = [part.view(torch.uint8) for part in scales]
        parts = {"codes": codes, "scales": _order_scales(torch.cat(scales), e).view(torch.uint8)}
        zeros = [q.zero_points for q in halves if q.zero_points is not None]
        if zeros:
            low, high = _order_scales(torch.cat(zeros), e).view(-1, 2).unbind(1)
            parts["zero_points"] = low | high << 4
        return parts

    def _unpack(self, parts: Mapping[str, Tensor], e: Encoding, rows: int, columns: int) -> dict[str, Tensor]:
        """Return the natural parts of a matrix [rows, columns] of some experts: [experts, ...] by name."""
        natural = (_unpack_4bit if e.bits == 4 else _unpack_8bit)(parts["codes"], rows, self._native(e))
        assert e.granularity is not None
        assert e.scale_dtype is not None
        grid = e.granularity.scale_shape(rows, columns)
        if isinstance(e.granularity, PerTensor):
            grid = parts["scales"].shape[1] // _scale_dtype(e).itemsize, 1  # one for each projection
        held = _restore_scales(parts["scales"].contiguous().view(_scale_dtype(e)), e, *grid)
        found = {"codes": natural.view(CODE_DTYPES[e.element]), "scales": held.to(SCALE_DTYPES[e.scale_dtype])}
        if "zero_points" in parts:
            pairs = parts["zero_points"]
            found["zero_points"] = _restore_scales(torch.stack([pairs & 15, pairs >> 4], -1).flatten(1), e, *grid)
        return found


def _matrices(spec: ExpertsSpec) -> dict[str, tuple[str, ...]]:
    """Return the projections of each packed matrix."""
    return {"up": ("gate", "up") if spec.gated else ("up",), "down": ("down",)}


def _held_scale(e: Encoding) -> str:
    """Return what scales are held as. Those of blocks and of matrices become float32, which is exact."""
    wide = isinstance(e.granularity, PerTensor) or (isinstance(e.granularity, PerGroup) and e.granularity.n > 1)
    return "float32" if wide else e.scale_dtype or ""


def _scale_dtype(e: Encoding) -> torch.dtype:
    return SCALE_DTYPES[_held_scale(e)]


# In the views below: n64 and k16 are tiles; i the pair of 8 rows, h its half, r the row; c the pair of columns, of
# which a tile has two halves of four (d); p the column of the pair.


def _pack_4bit(codes_NK: Tensor, native: bool) -> Tensor:
    """Order codes, uint8 [N, K/2], for 16-bit activations: uint8 [N * K/2]."""
    halves = codes_NK.view(-1, 4, 2, 8, codes_NK.shape[1] // 8, 2, 4)  # [n64, i, h, r, k16, d, c], bytes of two p
    if native:
        return halves.permute(4, 0, 3, 6, 1, 2, 5).reshape(-1)  # [k16, n64, r, c, i, h, d]
    first, last = halves.unbind(5)
    even, odd = first & 15 | (last & 15) << 4, first >> 4 | last & 0xF0  # bytes of two d
    words = torch.stack([even, odd])  # [p, n64, i, h, r, k16, c]
    return words.permute(5, 1, 4, 6, 2, 0, 3).reshape(-1)  # [k16, n64, r, c, i, p, h]


def _unpack_4bit(packed: Tensor, rows: int, native: bool) -> Tensor:
    """Invert :func:`_pack_4bit` for some experts: uint8 [experts, bytes] to [experts, N, K/2]."""
    words = packed.reshape(len(packed), -1, rows // 64, 8, 4, 4, 2, 2)
    if native:  # [experts, k16, n64, r, c, i, h, d]
        return words.permute(0, 2, 5, 6, 3, 1, 7, 4).reshape(len(packed), rows, -1)
    even, odd = words.unbind(6)  # [experts, k16, n64, r, c, i, p, h]
    halves = torch.stack([even & 15 | (odd & 15) << 4, even >> 4 | odd & 0xF0], 1)  # [experts, d, k16, n64, r, c, i, h]
    return halves.permute(0, 3, 6, 7, 4, 2, 1, 5).reshape(len(packed), rows, -1)


def _pack_8bit(codes_NK: Tensor, native: bool) -> Tensor:
    """Order codes, uint8 [N, K], for 16-bit activations: uint8 [N * K]."""
    view = codes_NK.view(-1, 4, 2, 8, codes_NK.shape[1] // 16, 2, 4, 2)  # [n64, i, h, r, k16, d, c, p]
    d_and_p = (5, 7) if native else (7, 5)
    return view.permute(4, 0, 3, 6, 1, 2, *d_and_p).reshape(-1)  # [k16, n64, r, c, i, h, p, d], or d before p


def _unpack_8bit(packed: Tensor, rows: int, native: bool) -> Tensor:
    """Invert :func:`_pack_8bit` for some experts: uint8 [experts, bytes] to [experts, N, K]."""
    words = packed.reshape(len(packed), -1, rows // 64, 8, 4, 4, 2, 2, 2)  # [experts, k16, n64, r, c, i, h, p, d]
    d, p = (7, 8) if native else (8, 7)
    return words.permute(0, 2, 5, 6, 3, 1, d, 4, p).reshape(len(packed), rows, -1)


def _order_scales(scales: Tensor, e: Encoding) -> Tensor:
    """Order what there is for each scale, [N, G], [N, 1], or the grid of blocks: [numbers]."""
    if isinstance(e.granularity, PerGroup) and e.granularity.n == 1:
        return scales.view(-1, 8, 8, scales.shape[1]).permute(3, 0, 2, 1).reshape(-1)
    if isinstance(e.granularity, PerChannel):
        return scales.view(-1, 4, 4, 2).transpose(1, 2).reshape(-1)
    return scales.T.reshape(-1)


def _restore_scales(ordered: Tensor, e: Encoding, rows: int, columns: int) -> Tensor:
    """Invert :func:`_order_scales` for some experts: [experts, numbers] to [experts, rows, columns]."""
    count = len(ordered)
    if isinstance(e.granularity, PerGroup) and e.granularity.n == 1:
        return ordered.reshape(count, columns, -1, 8, 8).permute(0, 2, 4, 3, 1).reshape(count, rows, columns)
    if isinstance(e.granularity, PerChannel):
        return ordered.reshape(count, -1, 4, 4, 2).transpose(2, 3).reshape(count, rows, columns)
    return ordered.reshape(count, columns, rows).mT.reshape(count, -1).view(count, rows, columns)
