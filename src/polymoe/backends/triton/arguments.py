"""Arguments of the Triton kernels: matrices, scales, decoding and activations of a problem as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from polymoe.backends.triton.tiles import PLANES, in_two_operands, scales_in_loop
from polymoe.formats import Encoding, PerGroup, PerTensor
from polymoe.kernels.triton import decode
from polymoe.layouts import Packed
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.activations import Activation, GeGLU, SwiGLU


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionArguments:
    """One projection of all experts, as kernels take it.

    Attributes:
        encoding: of the weights.
        n, k: rows and columns of one expert's matrix.
        tensors: codes as words, scales and zero points as bytes or floats, global scale and bias; where there is none,
            the codes, which are then not read.
        strides: of codes by expert, row and word, of scales by expert, row and group, of the bias by expert.
    """

    encoding: Encoding
    n: int
    k: int
    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, packed: Packed, projection: str) -> ProjectionArguments:
        """Return the arguments of a projection, "gate", "up" or "down", of a layer in the natural layout."""
        encoding = problem.spec.encodings[projection]
        parts = {name.split(".")[1]: t for name, t in packed.tensors.items() if name.startswith(projection + ".")}
        codes = parts["codes"] if PLANES[encoding.element] == 1 else parts["codes"].view(torch.int16)
        scales = parts.get("scales", codes)
        if scales.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
            scales = scales.view(torch.uint8)
        bias = packed.tensors.get(f"{projection}_bias", codes)
        scale_strides = scales.stride() if encoding.granularity is not None else (0, 0, 0)
        return cls(
            encoding,
            *problem.spec.matrix_shape(projection),
            (codes, scales, parts.get("zero_points", codes), parts.get("global_scale", codes), bias),
            (*codes.stride(), *scale_strides, bias.stride(0)),
        )

    @property
    def planes(self) -> int:
        """Columns that one word of codes holds."""
        return PLANES[self.encoding.element]

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """:attr:`strides` with those of codes in bytes."""
        size = self.tensors[0].element_size()
        return (*(size * stride for stride in self.strides[:3]), *self.strides[3:])

    @property
    def scale_align(self) -> int:
        """A power of two up to 16 that divides the offsets of rows of scales."""
        return gcd(self.strides[3], self.strides[4], 16)


def mode_of(activations: ActivationQuantization) -> str:
    """How the kernels round inputs."""
    if not activations.quantized:
        return "none"
    if activations.scale_dtype == "e8m0":
        return "mx"
    return "static" if activations.static else "row" if activations.group_columns is None else "block"


def operand_dtype(
    encoding: Encoding, device: torch.device, x_dtype: torch.dtype, activations: ActivationQuantization
) -> torch.dtype:
    """Return the dtype of both MMA operands.

    float16 if weights and x are float16, or if x is E4M3 and float16 holds the weights; otherwise bfloat16, which also
    holds E4M3 times a power of two.
    """
    if device.type == "cpu":
        return torch.float32
    if not activations.quantized:
        return torch.float16 if encoding.element == "fp16" and x_dtype == torch.float16 else torch.bfloat16
    scaled = activations.scale_dtype == "e8m0" or scales_in_loop(encoding)
    return torch.float16 if encoding.element in ("fp16", "e4m3") and not scaled else torch.bfloat16


def scale_arguments(encoding: Encoding, rows: int) -> tuple[str, int, int]:
    """Where scales are applied, and how many rows and columns share one."""
    granularity = encoding.granularity
    if granularity is None:
        return "none", 1, 1
    if not isinstance(granularity, PerGroup):
        return "row", rows if isinstance(granularity, PerTensor) else 1, 1
    return "loop" if scales_in_loop(encoding) else "block", granularity.n, granularity.k


def decoding(encoding: Encoding, operand: torch.dtype, in_float32: bool, *, exact: bool) -> dict[str, Any]:
    """The device functions that decode codes and scales, and the power of two that the accumulator gets back.

    With ``exact`` weights are not rounded: INT4, whose products with scales 16 bits do not hold, is two operands.
    """
    factors = {"e8m0": decode.factor_e8m0, "e4m3": decode.factor_e4m3}
    function, shift = {
        "e2m1": (decode.decode_e2m1, decode.E2M1_SHIFT),
        "int4": (decode.decode_int4, 0),
        "e4m3": (decode.decode_e4m3_half, decode.E4M3_SHIFT) if operand == torch.float16 else (decode.decode_e4m3, 0),
    }.get(encoding.element, (decode.decode_16bit, 0))
    if encoding.element == "e4m3" and scales_in_loop(encoding):
        function, shift = decode.decode_e4m3_scaled, decode.E4M3_SCALED_SHIFT
    factor = factors.get(encoding.scale_dtype or "", decode.factor_float)
    if exact and in_two_operands(encoding):
        half = encoding.scale_dtype == "float16"
        function = decode.decode_int4_exact_half if half else decode.decode_int4_exact
        factor = decode.factor_half if half else factor
    return {"DECODE": function, "FACTOR": factor, "UNSHIFT": 0 if in_float32 else shift}


def activation_arguments(activation: Activation | None) -> dict[str, Any]:
    """Name and constants as kernels take them; a limit of 0 is none."""
    name, constants = "none", (1.0, 0.0, 0.0)
    if isinstance(activation, SwiGLU):
        name, constants = "swiglu", (activation.alpha, activation.beta, activation.limit or 0.0)
    elif isinstance(activation, GeGLU):
        name = "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    elif activation is not None:
        name = "relu2"
    return {"ACTIVATION": name, **dict(zip(("ALPHA", "BETA", "LIMIT"), constants, strict=True))}
