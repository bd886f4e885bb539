"""Experts in 16 bits, quantized as they are read: for ``load(experts=...)`` and ``polymoe quantize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        encodings: of each projection, with scales that :func:`~polymoe.formats.format_of` quantizes to.
        where: the name of a projection's tensor, for errors.
        device: where it is done, and where the result is; None is the expert's own.
        importance: how much the squared error of each column counts: ``gate_up`` [H], ``down`` [F]; None for all alike.

    Raises:
        FormatError: for weights that are not finite, or too large for the format.
    """
    if device is not None:
        expert = expert.to(device)
    weights = {name: q.codes for name, q in expert.projections.items()}

    def one(name: str, values: Tensor) -> QuantTensor:
        part = "down" if name == "down" else "gate_up"
        try:
            return format_of(encodings[name]).quantize(values, None if importance is None else importance[part])
        except FormatError as error:
            raise FormatError(where(name), expected=error.expected, got=error.got, hint=error.hint) from error

    if encodings["up"].global_scale and "gate" in weights:
        both = one("gate", torch.cat([weights.pop("gate"), weights.pop("up")]))
        rows = both.shape[0] // 2
        found = {"gate": both.rows(0, rows), "up": both.rows(rows, 2 * rows), "down": one("down", weights["down"])}
    else:
        found = {name: one(name, values) for name, values in weights.items()}
    return replace(
        expert, gate=found.get("gate"), up=found["up"], down=found["down"],
        gate_up_input_scale=None, down_input_scale=None,
    )  # fmt: skip
