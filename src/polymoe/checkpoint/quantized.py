"""Experts in 16 bits, quantized as they are read: for ``load(experts=...)`` and ``polymoe quantize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from polymoe.common.threads import threads_of
from polymoe.errors import ArgumentError, CheckpointError, FormatError, nearest
from polymoe.formats import FORMATS, Encoding, PerGroup, QuantTensor, format_of
from polymoe.formats.tensor import DAMAGED
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.tensors import Expert, ExpertsSpec

if TYPE_CHECKING:
    from torch import Tensor

QUANTIZED_FORMATS = ("mxfp4", "nvfp4", "int4_g32", "int4_g128", "fp8_block128", "mxfp8")
"""Formats that experts can be quantized to."""

_TOGETHER_ON = ("cuda",)
"""Types of devices on which experts are quantized together."""

_TOGETHER_WEIGHTS = 5 << 23
"""Weights that are quantized together. Temporary memory on the device is up to 36 bytes for each."""

_READERS = 4
"""Threads that copy experts to pinned memory."""

_RECIPES = {"fp8_block128": "fp8_group128", "mxfp8": "mxfp8"}


def require_format(format: str) -> str:
    """Return the name of a format that experts can be quantized to.

    Raises:
        ArgumentError: for any other name.
    """
    if format not in QUANTIZED_FORMATS:
        raise ArgumentError("experts", got=repr(format), hint=nearest(format, QUANTIZED_FORMATS))
    return format


def recipe_of(format: str) -> ActivationQuantization:
    """How the inputs of experts in a format are quantized: as releases in this format do it."""
    return ActivationQuantization.of(_RECIPES[format]) if format in _RECIPES else UNQUANTIZED


def quantized_spec(spec: ExpertsSpec, format: str, where: str) -> ExpertsSpec:
    """Return the spec of the same experts in ``format``.

    Raises:
        CheckpointError: if they are not in 16 bits, or if their sizes are no multiples of the format's groups.
    """
    if any(encoding.element not in ("bf16", "fp16") for encoding in spec.encodings.values()):
        raise CheckpointError(
            where,
            expected="experts in 16 bits",
            got=f"{spec.format} experts",
            hint="they are quantized already, and load as they are",
        )
    if not _divides(spec, FORMATS[format].encoding):
        fitting = [name for name in QUANTIZED_FORMATS if _divides(spec, FORMATS[name].encoding)]
        raise CheckpointError(
            where,
            expected=f"sizes that are multiples of {format}'s groups of {FORMATS[format].encoding.group_columns}",
            got=f"H={spec.hidden}, F={spec.intermediate}",
            hint=f"these sizes allow {', '.join(fitting) or 'none of its formats'}",
        )
    encoding = FORMATS[format].encoding
    return replace(spec, gate=encoding if spec.gated else None, up=encoding, down=encoding)


def _divides(spec: ExpertsSpec, encoding: Encoding) -> bool:
    """Whether groups are whole. Blocks of FP8 may be cut at the end, as those of releases are."""
    g = encoding.granularity
    return not isinstance(g, PerGroup) or g.n > 1 or not (spec.hidden % g.k or spec.intermediate % g.k)


def quantize_expert(
    expert: Expert,
    encodings: Mapping[str, Encoding],
    where: Callable[[str], str],
    *,
    importance: Mapping[str, Tensor] | None = None,
) -> Expert:
    """Quantize one expert. Gate and up get one global scale, since most kernels have room for one.

    Args:
        expert: in 16 bits.
        encodings: of each projection, with scales that :func:`~polymoe.formats.format_of` quantizes to; the same for
            gate and up.
        where: the name of a projection's tensor, for errors.
        importance: how much the squared error of each column counts: ``gate_up`` [H], ``down`` [F]; None for all alike.

    Raises:
        FormatError: for weights that are not finite, or too large for the format.
    """
    return _quantized([expert], encodings, where, importance or {})[0]


def _quantized(
    experts: Sequence[Expert],
    encodings: Mapping[str, Encoding],
    where: Callable[[str], str],
    importance: Mapping[str, Tensor],
) -> list[Expert]:
    """Quantize experts of one layer together: on a GPU most of the time is that of launches. Errors name the first."""
    first = experts[0]

    def quantize(names: Sequence[str], values: Tensor, importance_K: Tensor | None) -> QuantTensor:
        try:
            columns = None if importance_K is None else importance_K.expand(*values.shape[:-2], -1)
            return format_of(encodings[names[0]]).quantize(values, columns)
        except FormatError as error:
            weights = first.projections
            name = next((name for name in names if not weights[name].codes.isfinite().all()), None)
            hint = error.hint if name is None else DAMAGED
            raise FormatError(where(name or names[0]), expected=error.expected, got=error.got, hint=hint) from error

    def stacked(names: Sequence[str]) -> Tensor:
        parts = [x.projections[name].codes for x in experts for name in names]
        return torch.stack(parts).view(len(experts), len(names), *parts[0].shape) if len(parts) > 1 else parts[0][None]

    down = quantize(["down"], stacked(["down"]).view(len(experts), *first.down.shape), importance.get("down"))
    names, columns = [name for name in ("gate", "up") if name in first.projections], importance.get("gate_up")
    values, rows = stacked(names), len(first.up.codes)
    if encodings["up"].global_scale:
        both = quantize(names, values.view(len(experts), -1, values.shape[-1]), columns)
        apart = [both.rows(i * rows, (i + 1) * rows) for i in range(len(names))]
    else:
        both = quantize(names, values.view(len(experts), len(names), rows, -1), columns)
        apart = [both.map(lambda part, i=i: part[:, i]) for i in range(len(names))]
    found = dict(zip(names, apart, strict=True))
    return [
        replace(
            x, gate=found["gate"][e] if "gate" in found else None, up=found["up"][e], down=down[e],
            gate_up_input_scale=None, down_input_scale=None,
        )
        for e, x in enumerate(experts)
    ]  # fmt: skip


class QuantizedReader:
    """Reads experts of one layer, and quantizes them on a device.

    On a GPU, those that are read one after the other are quantized several at once, while threads copy the next ones to
    pinned memory. Their codes are the same as those of each expert alone.

    Args:
        read: reads an expert in 16 bits, by its number, with or without a check of its numbers.
        encodings: as of :func:`quantize_expert`.
        where: the name of the tensor of an expert's projection, for errors.
        experts: the numbers of those that may be read in order.
        device: where they are quantized, and then are.
    """

    def __init__(
        self,
        read: Callable[[int, bool], Expert],
        encodings: Mapping[str, Encoding],
        where: Callable[[int, str], str],
        experts: range,
        device: torch.device,
    ) -> None:
        self._read, self._encodings, self._where, self._experts = read, encodings, where, experts
        # Threads have a current GPU of their own.
        self._device = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
        self._next = experts.start
        self._ahead: dict[int, Future[Expert]] = {}
        self._done: dict[int, Expert] = {}

    def __call__(self, e: int, *, check: bool = True) -> Expert:
        """Return expert ``e``, quantized.

        Raises:
            FormatError: as :func:`quantize_expert`.
        """
        if check or e != self._next or self._device.type not in _TOGETHER_ON:
            expert = self._alone(e, check)
        else:
            if e not in self._done:
                self._done = self._together(e)
            expert = self._done.pop(e)
        self._next = e + 1
        return expert

    def _alone(self, e: int, check: bool) -> Expert:
        expert = _pinned(self._read(e, check), self._device)
        return quantize_expert(_sent(expert, self._device), self._encodings, partial(self._where, e))

    def _together(self, e: int) -> dict[int, Expert]:
        """Return the block of experts that begins with ``e``; the one behind it is read meanwhile."""
        head = self._ahead.pop(e, None)
        expert = _pinned(self._read(e, False), self._device) if head is None else head.result()
        weights = sum(matrix.codes.numel() for matrix in expert.projections.values())
        size = max(1, _TOGETHER_WEIGHTS // weights)
        behind = range(e + 1, min(e + 2 * size, self._experts.stop))
        for other in behind:
            if other not in self._ahead:
                self._ahead[other] = threads_of(_READERS).submit(_pinned, self._read(other, False), self._device)
        block = [expert, *(self._ahead.pop(other).result() for other in behind[: size - 1])]
        block = [_sent(x, self._device) for x in block]
        try:
            found = _quantized(block, self._encodings, partial(self._where, e), {})
        except FormatError:
            return {e: self._alone(e, False)}  # so that the error names a tensor of the expert that has it
        return dict(enumerate(found, e))


def _pinned(expert: Expert, device: torch.device) -> Expert:
    """Copy an expert to pinned memory, from which a GPU copies faster than from a mapped file."""
    if device.type != "cuda":
        return expert
    with torch.cuda.device(device):
        return expert.map(lambda part: part.pin_memory() if part.is_cpu else part)


def _sent(expert: Expert, device: torch.device) -> Expert:
    # Torch's allocator does not reuse pinned memory before pending copies from it have finished.
    return expert.map(lambda part: part.to(device, non_blocking=True))
