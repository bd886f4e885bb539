"""Layouts of FlashInfer's kernels for SM100 and SM120: the checkpoint's bytes, moved to where each kernel reads them.

Nothing is quantized, and nothing is padded: sizes that would need padding are refused.

* ``flashinfer_trtllm_*`` (SM100): rows are up and gate in turn (of experts without a gate, those of up). Of each 32
  rows, row ``4a + b`` becomes row ``8b + a``, because a thread of the MMA's epilogue has every eighth row. INT4 codes
  become two's complement, and lie in blocks of 256 columns: [K/256, N, 128] bytes.
* ``flashinfer_sm12x_nvfp4`` (SM120, SM121): rows of the gate, then of up, in the checkpoint's order.

In all of them the scale of row m and group g is number ``(m // 128 * G / 4 + g // 4) * 512 + m % 32 * 16 + m % 128
// 32 * 4 + g % 4`` of its matrix: tensor cores of these GPUs read the scales of 128 rows and 4 groups as one block.

Kernels that quantize x and h to NVFP4 take one global scale a layer. Such scales are made of the experts' input scales
when a layer is packed, and lie beside the packed tensors under names that begin with ``kernel.``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats import FORMATS, Encoding, QuantTensor
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.layouts.cuda.matrices import MatrixLayout
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

_SIGN_BITS = 0x88
"""Added to a byte of INT4 codes, which are stored as code + 8, it gives two's complement."""


@dataclass(frozen=True, slots=True)
class _Blackwell(MatrixLayout):
    """What both layouts share.

    Attributes:
        format: of all projections, as in ``FORMATS``.
    """

    format: str
    multiple: ClassVar[int] = 128
    group_rows: ClassVar[int] = 1

    @property
    def encoding(self) -> Encoding:
        """Of all projections."""
        return FORMATS[self.format].encoding

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        scales, own = encoding.scale_dtype or "none", self.encoding
        # The same name may stand for other scales.
        got = encoding.name if encoding.name != own.name else f"{encoding.name} with scales {scales}"
        reasons.need(encoding == own, f"{projection} weights", own.name, got)

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        return rows * columns // encoding.group_columns * SCALE_DTYPES.itemsize(encoding.scale_dtype or "")


@dataclass(frozen=True, slots=True)
class FlashInferTrtllm(_Blackwell):
    """Weights for the kernels that TensorRT-LLM generates for SM100, with ``int4_g32``, ``mxfp4`` or ``nvfp4``."""

    def multiples(self, spec: ExpertsSpec) -> tuple[int, int]:
        """Blocks of INT4 codes have 256 columns; blocks of scales have 128 rows, 64 where gate and up are one."""
        if self.format == "int4_g32":
            return 256, 256
        return 128, 64 if spec.gated and self.format == "nvfp4" else 128

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Return the bytes of the packed layer, with the scales that kernels take beside it."""
        # Of x; and of each expert those of gate, up and down.
        more = 4 * (1 + 3 * spec.local_experts) if self.encoding.global_scale else 0
        return super(_Blackwell, self).nbytes(spec) + more

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return codes, uint8 [N, K/2] or [K/256, N, 128], scales [N, G] of the matrix, and no limit on scales."""
        codes_NB = _shuffle(_in_turns([q.codes for q in halves]))
        if self.format == "int4_g32":
            codes_NB = (codes_NB ^ _SIGN_BITS).unflatten(1, (-1, 128)).transpose(0, 1).contiguous()
        scales_NG = _shuffle(_in_turns([_plain(q.scales) for q in halves]))
        return {"codes": codes_NB, "scales": _swizzle(scales_NG)}, None

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        codes = parts["codes"]
        if self.format == "int4_g32":
            codes = codes.transpose(1, 2).flatten(2) ^ _SIGN_BITS
        both = (_apart(_straighten(x), halves) for x in (codes, _unswizzle(parts["scales"])))
        return [{"codes": c, "scales": s} for c, s in zip(*both, strict=True)]

    def derive(self, spec: ExpertsSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scales of NVFP4 inputs: ``kernel.x_scale`` [1], which multiplies x before it is rounded; and for
        each expert ``kernel.gate_scale``, which multiplies the sums of the gate (of up where there is none),
        ``kernel.h_scale``, which multiplies those of up as h is rounded, and ``kernel.down_scale``."""
        if not self.encoding.global_scale:
            return {}
        x, h = (_input_scale(tensors, name) for name in ("gate_up", "down"))
        up, down = tensors["up.global_scale"], tensors["down.global_scale"]
        return {
            "kernel.x_scale": x.reciprocal(),
            "kernel.gate_scale": (tensors["gate.global_scale"] if spec.gated else up) * x,
            # Without a gate the activation takes sums that are scaled already.
            "kernel.h_scale": (up * x if spec.gated else torch.ones_like(up)) / h,
            "kernel.down_scale": down * h,
        }


@dataclass(frozen=True, slots=True)
class FlashInferSM12x(_Blackwell):
    """NVFP4 weights for the CuTe DSL kernels for SM120 and SM121, with 16-bit and with NVFP4 inputs."""

    def multiples(self, spec: ExpertsSpec) -> tuple[int, int]:
        """Blocks of scales have 128 rows; gate and up are one matrix."""
        return 128, 64 if spec.gated else 128

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Return the bytes of the packed layer, with the scales that kernels take beside it."""
        return super(_Blackwell, self).nbytes(spec) + 4 * (2 + spec.local_experts)

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return codes, uint8 [N, K/2], scales, uint8 [N, G], of the matrix, and no limit on scales."""
        scales_NG = torch.cat([_plain(q.scales) for q in halves])
        return {"codes": torch.cat([q.codes for q in halves]), "scales": _swizzle(scales_NG)}, None

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        both = (
            [half.flatten(0, 1) for half in x.unflatten(1, (halves, -1)).unbind(1)]
            for x in (parts["codes"], _unswizzle(parts["scales"]))
        )
        return [{"codes": c, "scales": s} for c, s in zip(*both, strict=True)]

    def derive(self, spec: ExpertsSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scales of NVFP4 inputs, ``kernel.x_scale`` and ``kernel.h_scale`` [1], which multiply x and h
        before they are rounded; and ``kernel.down_scale``, the global scale of down for each expert.

        The kernels take one global scale for gate and up: the gate's. Where up has another one, h is off by a factor,
        for which the scale of down makes up.
        """
        x, h = (_input_scale(tensors, name) for name in ("gate_up", "down"))
        down = tensors["down.global_scale"]
        if spec.gated:
            down = down * (tensors["up.global_scale"] / tensors["gate.global_scale"])
        return {"kernel.x_scale": x.reciprocal(), "kernel.h_scale": h.reciprocal(), "kernel.down_scale": down.clone()}


def _plain(scales: Tensor | None) -> Tensor:
    """Scales as a dtype that torch copies in any order: bytes, or bfloat16."""
    assert scales is not None
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


def _in_turns(halves: Sequence[Tensor]) -> Tensor:
    """Rows of up and gate in turn, of [gate, up]; those of a single projection as they are."""
    return torch.stack(tuple(halves[::-1]), 1).flatten(0, 1)


def _apart(rows: Tensor, halves: int) -> list[Tensor]:
    """Return the projections, each [experts * N, ...], of [experts, N * halves, ...]: the inverse of
    :func:`_in_turns`."""
    return [half.flatten(0, 1) for half in rows.unflatten(1, (-1, halves)).unbind(2)[::-1]]


def _shuffle(rows: Tensor) -> Tensor:
    """Move row 4a + b of each 32 to 8b + a: [N, ...]."""
    return rows.unflatten(0, (-1, 8, 4)).transpose(1, 2).flatten(0, 2)


def _straighten(rows: Tensor) -> Tensor:
    """The inverse of :func:`_shuffle` for [experts, N, ...]."""
    return rows.unflatten(1, (-1, 4, 8)).transpose(2, 3).flatten(1, 3)


def _swizzle(scales_NG: Tensor) -> Tensor:
    """Scales [N, G] in blocks of 128 rows and 4 groups, in a tensor of the same shape."""
    blocks = scales_NG.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # [N/128, 4, 32, G/4, 4]
    return blocks.permute(0, 3, 2, 1, 4).reshape(scales_NG.shape)


def _unswizzle(scales: Tensor) -> Tensor:
    """The inverse of :func:`_swizzle` for [experts, N, G]."""
    experts, rows, groups = scales.shape
    blocks = scales.reshape(experts, rows // 128, groups // 4, 32, 4, 4)
    return blocks.permute(0, 1, 4, 3, 2, 5).reshape(scales.shape)


def _input_scale(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The largest input scale of the experts, float32 [1], and 1 where one has none, as the reference takes it."""
    found = tensors.get(f"{name}_input_scale")
    if found is None:
        return torch.ones(1, dtype=torch.float32, device=tensors["down.global_scale"].device)
    most = found.float().amax().reshape(1)  # NaN where an expert has none
    return torch.where(most.isfinite() & (most > 0), most, torch.ones_like(most))
