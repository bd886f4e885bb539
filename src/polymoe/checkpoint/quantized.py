"""Experts in 16 bits, quantized as they are read: for ``load(experts=...)`` and ``polymoe quantize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from polymoe.errors import ArgumentError, CheckpointError, FormatError, nearest
from polymoe.formats import FORMATS, Encoding, PerGroup, QuantTensor, format_of
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.tensors import Expert, ExpertsSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["QUANTIZED_FORMATS", "quantize_expert", "quantized_spec", "recipe_of", "require_format"]

QUANTIZED_FORMATS = ("mxfp4", "nvfp4", "int4_g32", "int4_g128", "fp8_block128", "mxfp8")
"""Formats that experts can be quantized to."""

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
            expected=f"sizes that are multiples of {format}'s groups",
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
    device: torch.device | str | None = None,
    importance: Mapping[str, Tensor] | None = None,
) -> Expert:
    """Quantize one expert. Gate and up get one global scale, since most kernels have room for one.

    Args:
        expert: in 16 bits.
        encodings: of each projection, with scales that :func:`~polymoe.formats.format_of` quantizes to; the same for
            gate and up.
        where: the name of a projection's tensor, for errors.
        device: where it is done, and where the result is; None is the expert's own.
        importance: how much the squared error of each column counts: ``gate_up`` [H], ``down`` [F]; None for all alike.

    Raises:
        FormatError: for weights that are not finite, or too large for the format.
    """
    if device is not None:
        expert = _sent(expert, torch.device(device))
    weights = {name: q.codes for name, q in expert.projections.items()}
    importance = importance or {}

    def quantize(names: Sequence[str], values: Tensor, importance_K: Tensor | None) -> QuantTensor:
        try:
            return format_of(encodings[names[0]]).quantize(values, importance_K)
        except FormatError as error:
            name = next((name for name in names if not weights[name].isfinite().all()), names[0])
            raise FormatError(where(name), expected=error.expected, got=error.got, hint=error.hint) from error

    found = {"down": quantize(["down"], weights["down"], importance.get("down"))}
    names, columns = [name for name in ("gate", "up") if name in weights], importance.get("gate_up")
    values = [weights[name] for name in names]
    # Both in one call: on a GPU most of the time is that of launches.
    if encodings["up"].global_scale:
        both, rows = quantize(names, torch.cat(values), columns), len(values[0])
        found |= {name: both.rows(i * rows, (i + 1) * rows) for i, name in enumerate(names)}
    else:
        stack = quantize(names, torch.stack(values), None if columns is None else columns.expand(len(names), -1))
        found |= {name: stack[i] for i, name in enumerate(names)}
    return replace(
        expert, gate=found.get("gate"), up=found["up"], down=found["down"],
        gate_up_input_scale=None, down_input_scale=None,
    )  # fmt: skip


def _sent(expert: Expert, device: torch.device) -> Expert:
    """Copy an expert to a device: to a GPU from pinned memory, which is faster than from a mapped file."""
    if device.type != "cuda":
        return expert.to(device)
    # Torch's allocator does not reuse pinned memory before pending copies from it have finished.
    return expert.map(lambda part: part.pin_memory().to(device, non_blocking=True) if part.is_cpu else part)
