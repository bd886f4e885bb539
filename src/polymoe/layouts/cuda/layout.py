"""The Hopper layout: weights in the order in which ``mma.sync`` m16n8k16 and ``wgmma`` m64k16 want their A operand.

Matrices. ``up`` holds gate and up together where there is a gate: rows 8i to 8i + 7 of the gate, then the same rows of
up, so that a thread holds both inputs of the activation. ``down`` is as it is.

The order within a matrix is described beside this file: :mod:`.w4a16_fragments` for 4-bit weights that are decoded in
registers, :mod:`.w4a8_fragments` for 4-bit weights that are decoded to E4M3, :mod:`.w8_fragments` for E4M3 weights, and
:mod:`.w16_swizzle128` for bfloat16 weights, which the tensor cores read as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polymoe.errors import PlanError, ScaleError
from polymoe.formats import FORMATS, Encoding, PerGroup, QuantTensor
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES
from polymoe.layouts.base import Packed
from polymoe.layouts.cuda import w4a8_fragments as w4a8_fragments
from polymoe.layouts.cuda.w4a16_fragments import (
    COLUMNS,
    E4M3_MOST,
    E8M0_MOST,
    TILE,
    pack_codes,
    pack_scales,
    scale_bytes,
    unpack_codes,
    unpack_scales,
)
from polymoe.layouts.cuda.w8_fragments import BLOCK, pack_bytes, unpack_bytes
from polymoe.layouts.cuda.w16_swizzle128 import neighbours, pack_tiles, unpack_tiles
from polymoe.layouts.staging import drop_absent, store, uploaded
from polymoe.tensors import Expert, ExpertsSpec, ExpertWeights
from polymoe.verdict import Reason, Reasons

__all__ = ["Fragments"]

_MATRICES = ("up", "down")

# Largest byte of a scale that the kernels decode, in words, and what is larger.
_LIMITS = {
    "e8m0": (E8M0_MOST, "E8M0 scales of at most 2**25", "2**{exponent}"),
    "e4m3": (E4M3_MOST, "E4M3 scales from 0 to 448", "the byte {byte:#x}"),
}

_STEPS = (w4a8_fragments.MOST_STEP, "scales of a row within 2**14 of each other", "some 2**{step} apart")


@dataclass(frozen=True, slots=True)
class Fragments:
    """Tensors ``up.codes``, ``up.scales``, ``down.codes`` and ``down.scales``, all [E, bytes] uint8;
    ``{projection}.global_scale`` [E] where there is one; biases and input scales as in the natural layout.

    4-bit elements with scales by group of 16, 32, 64 or 128 columns and fixed zero; bfloat16, which has no scales; E4M3
    with scales for 128 x 128, which are held as float32 in their own order, the gate's before up's. With ``e4m3``,
    MXFP4 for products with E4M3 rows.
    """

    name: str = "hopper"
    e4m3: bool = False

    def check(self, spec: ExpertsSpec) -> tuple[Reason, ...]:
        """Every reason against it: formats that it does not hold, and sizes that do not fit its tiles."""
        reasons = Reasons()
        if self.e4m3:
            for projection, encoding in spec.encodings.items():
                reasons.need(encoding == FORMATS["mxfp4"].encoding, f"{projection} weights", "mxfp4", encoding.name)
            for name, size in (("H", spec.hidden), ("F", spec.intermediate)):
                reasons.need(size % COLUMNS == 0, name, f"a multiple of {COLUMNS}", size)
            return tuple(reasons.found)
        if spec.gate is not None:
            both = ", ".join(f"{e.name} with scales {e.scale_dtype}" for e in (spec.gate, spec.up))
            reasons.need(spec.gate == spec.up, "gate and up", "one encoding", both)
        for projection, encoding in spec.encodings.items():
            fits = encoding.bits == 4 or encoding.element in ("bf16", "e4m3")
            reasons.need(fits, f"{projection} elements", "4 bits, e4m3 or bf16", f"{encoding.element}")
            g = encoding.granularity
            if encoding.element == "e4m3":
                reasons.need(g == PerGroup(BLOCK, BLOCK), f"{projection} scales", "one for 128 x 128 weights", str(g))
                fits = encoding.scale_dtype in ("float32", "bfloat16", "e8m0")
                reasons.need(fits, f"{projection} scales", "float32, bfloat16 or e8m0", f"{encoding.scale_dtype}")
                reasons.need(not encoding.global_scale, f"{projection} global scale")
            grouped = isinstance(g, PerGroup) and g.n == 1 and g.k in (16, 32, 64, 128)
            if encoding.bits == 4:
                expected = "groups of 16, 32, 64 or 128 columns"
                if reasons.need(grouped, f"{projection} scales", expected, str(g)):
                    for dtype, columns in (("e8m0", 32), ("e4m3", 16)):
                        fits = encoding.scale_dtype != dtype or encoding.group_columns == columns
                        expected = f"groups of {columns} columns for {dtype.upper()}"
                        reasons.need(fits, f"{projection} scales", expected, str(g))
            reasons.need(not encoding.zero_points, f"{projection} zero points")
        tile = BLOCK if any(e.element == "e4m3" for e in spec.encodings.values()) else TILE
        for name, size in (("H", spec.hidden), ("F", spec.intermediate)):
            reasons.need(size % tile == 0, name, f"a multiple of {tile}", size)
        return tuple(reasons.found)

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Bytes of the packed layer, up to input scales and biases wider than 2 bytes."""
        total = 2 * (spec.intermediate * (len(spec.encodings) - 1) + spec.hidden) if spec.bias else 0
        total += sum(4 for e in spec.encodings.values() if e.global_scale)
        for name in _MATRICES:
            rows, columns = _shape(spec, name)
            encoding = spec.encodings[name]
            total += rows * columns * encoding.bits // 8
            if self.e4m3:
                total += w4a8_fragments.scale_bytes(rows, columns)
            elif encoding.bits == 4:
                total += scale_bytes(encoding, rows, columns)
            elif encoding.bits == 8:
                total += rows // BLOCK * (columns // BLOCK) * 4
        return spec.local_experts * total

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Pack expert by expert, computing on ``device``.

        Raises:
            PlanError: if ``out`` holds experts of another spec.
            ScaleError: for scales that no kernel of this layout decodes: E8M0 above 2**25, negative or NaN E4M3; with
                ``e4m3``, those that lie more than 2**14 below another of their row.
        """
        if out is not None and out.spec != weights.spec:
            raise PlanError("update", expected=str(out.spec), got=str(weights.spec), hint="load these experts anew")
        tensors = {} if out is None else out.tensors
        count = weights.spec.local_experts
        largest = torch.zeros(count, 2, dtype=torch.uint8, device=device)
        for e, expert in enumerate(uploaded(weights, device)):
            parts = dict(expert.vectors)
            for projection, q in expert.projections.items():
                if q.global_scale is not None:
                    parts[f"{projection}.global_scale"] = q.global_scale
            for i, name in enumerate(_MATRICES):
                encoding = expert.projections[name].encoding
                if encoding.bits != 4:
                    parts |= _pack_whole(expert, name)
                    continue
                codes_NB, scales_NG = _rows(expert, name)
                if self.e4m3:
                    parts[f"{name}.codes"] = w4a8_fragments.pack_codes(codes_NB)
                    parts[f"{name}.scales"], largest[e, i] = w4a8_fragments.pack_scales(scales_NG.squeeze(2), codes_NB)
                    continue
                if encoding.scale_dtype in _LIMITS:
                    largest[e, i] = scales_NG.max()
                parts[f"{name}.codes"] = pack_codes(codes_NB, encoding)
                parts[f"{name}.scales"] = pack_scales(scales_NG, encoding, codes_NB.shape[1] * 2)
            store(tensors, parts, e, count, device, fresh=out is None)
        dtypes = [weights.spec.encodings[name].scale_dtype or "" for name in _MATRICES]
        limits = [_STEPS if self.e4m3 else _LIMITS.get(dtype, (255, "", "")) for dtype in dtypes]
        most = torch.tensor([limit for limit, _, _ in limits], device=device)
        # Once for the layer: each look waits for the device. Tensors without memory hold nothing to look at.
        bad = (largest > most).nonzero().tolist() if device.type != "meta" else []
        if bad:
            e, i = bad[0]
            _, expected, got = limits[i]
            raise ScaleError(
                f"expert {e} {_MATRICES[i]} scales",
                expected=expected,
                got=got.format(byte=int(largest[e, i]), exponent=int(largest[e, i]) - 127, step=int(largest[e, i])),
                hint="name a backend that reads the natural layout",
            )
        return Packed(self.name, weights.spec, tensors)

    def unpack(self, packed: Packed) -> ExpertWeights:
        """Experts put together again from the packed tensors, one at a time."""
        spec = packed.spec

        def read(e: int) -> Expert:
            mine = {name: tensor[e] for name, tensor in packed.tensors.items()}
            projections = {}
            for name in _MATRICES:
                encoding, (rows, columns) = spec.encodings[name], _shape(spec, name)
                split = ("gate", "up") if name == "up" and spec.gated else (name,)
                if encoding.bits != 4:
                    projections |= _unpack_whole(mine, name, split, encoding, rows, columns)
                    continue
                if self.e4m3:
                    codes_NB = w4a8_fragments.unpack_codes(mine[f"{name}.codes"], rows, columns)
                    scales_NG = w4a8_fragments.unpack_scales(mine[f"{name}.scales"], rows, columns)
                else:
                    codes_NB = unpack_codes(mine[f"{name}.codes"], encoding, rows, columns)
                    scales_NG = unpack_scales(mine[f"{name}.scales"], encoding, rows, columns)
                halves = zip(split, _out_of_turns(codes_NB, split), _out_of_turns(scales_NG, split), strict=True)
                for projection, codes, scales in halves:
                    projections[projection] = QuantTensor(
                        codes,
                        encoding,
                        scales.contiguous().view(SCALE_DTYPES[encoding.scale_dtype or ""]),
                        global_scale=mine.get(f"{projection}.global_scale"),
                    )
            vectors = drop_absent({n: t for n, t in mine.items() if "." not in n})
            return Expert(**{"gate": None, **projections, **vectors})  # type: ignore[arg-type]

        return ExpertWeights(spec, read)


def _shape(spec: ExpertsSpec, matrix: str) -> tuple[int, int]:
    """``[N, K]`` of a packed matrix: gate and up are one."""
    rows, columns = spec.matrix_shape(matrix)
    return (2 * rows if matrix == "up" and spec.gated else rows), columns


def _pack_whole(expert: Expert, matrix: str) -> dict[str, Tensor]:
    """A packed matrix of elements of 8 or 16 bits, and its scales, if it has any."""
    own, gate = expert.projections[matrix], expert.gate if matrix == "up" else None
    both = [own] if gate is None else [gate, own]
    codes = [q.codes.view(torch.uint8) for q in both]
    rows_NB = neighbours(codes[0]) if gate is None else _in_turns(codes)
    if own.scales is None:
        return {f"{matrix}.codes": pack_tiles(rows_NB)}
    scales = torch.cat([q.scales.float().flatten() for q in both if q.scales is not None])
    return {f"{matrix}.codes": pack_bytes(rows_NB), f"{matrix}.scales": scales.view(torch.uint8)}


def _unpack_whole(
    parts: Mapping[str, Tensor], matrix: str, split: Sequence[str], encoding: Encoding, rows: int, columns: int
) -> dict[str, QuantTensor]:
    """Inverse of :func:`_pack_whole`: by projection."""
    codes = parts[f"{matrix}.codes"]
    scales: Sequence[Tensor | None] = [None] * len(split)
    if encoding.granularity is None:
        rows_NB = unpack_tiles(codes, rows, 2 * columns)
    else:
        rows_NB = unpack_bytes(codes, rows, columns)
        grid = encoding.granularity.scale_shape(rows // len(split), columns)
        natural = parts[f"{matrix}.scales"].view(torch.float32).to(SCALE_DTYPES[encoding.scale_dtype or ""])
        scales = list(natural.view(len(split), *grid))
    halves = _out_of_turns(rows_NB, split) if len(split) > 1 else [neighbours(rows_NB, inverse=True)]
    return {
        projection: QuantTensor(half.view(CODE_DTYPES[encoding.element]), encoding, part)
        for projection, half, part in zip(split, halves, scales, strict=True)
    }


def _rows(expert: Expert, matrix: str) -> tuple[Tensor, Tensor]:
    """Codes [N, K/2] and scales [N, G, bytes] of a packed matrix, as bytes, gate and up in turns of 8 rows."""
    both = [expert.gate, expert.up] if matrix == "up" and expert.gate is not None else [expert.projections[matrix]]
    parts = []
    for q in both:
        assert q is not None
        assert q.scales is not None
        scales = q.scales.contiguous()
        parts.append((q.codes, scales.view(torch.uint8).view(*scales.shape, scales.element_size())))
    codes, scales = zip(*parts, strict=True)
    return _in_turns(codes), _in_turns(scales)


def _in_turns(halves: Sequence[Tensor]) -> Tensor:
    if len(halves) == 1:
        return halves[0]
    return torch.stack([h.unflatten(0, (-1, 8)) for h in halves], 1).flatten(0, 2)


def _out_of_turns(rows: Tensor, split: Sequence[str]) -> Sequence[Tensor]:
    """Inverse of :func:`_in_turns`."""
    return [h.flatten(0, 1) for h in rows.unflatten(0, (-1, len(split), 8)).unbind(1)]
