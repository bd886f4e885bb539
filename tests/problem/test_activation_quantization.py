"""Activation quantization as a value: names, what it says of scales, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polymoe.errors import ArgumentError
from polymoe.formats import PerGroup
from polymoe.problem.activation_quantization import (
    ACTIVATIONS,
    FP8_GROUP128,
    FP8_STATIC,
    FP8_TOKEN,
    MXFP8,
    NVFP4,
    UNQUANTIZED,
    ActivationQuantization,
)
from polymoe.problem.numerics import TOLERANCE, TOLERANCE_E2M1, TOLERANCE_FAST_ACCUMULATION
from support.problems import problem_of, random_experts


def test_names_are_converted() -> None:
    for name, value in ACTIVATIONS.items():
        assert (str(value), ActivationQuantization.of(name), ActivationQuantization.of(value)) == (name, value, value)
        assert problem_of(random_experts(), activations=name).activations is value
    assert [name for name, value in ACTIVATIONS.items() if value.quantized] == list(ACTIVATIONS)[1:]
    with pytest.raises(ArgumentError, match="activations: got 'fp8_tokens'\n  hint: did you mean 'fp8_token'"):
        ActivationQuantization.of("fp8_tokens")


def test_scales_of_a_row() -> None:
    assert [a.scales_per_row(2880) for a in ACTIVATIONS.values()] == [None, 1, 23, 23, None, 90, None, 1, None]
    assert (MXFP8.group_columns, MXFP8.scale_dtype) == (32, "e8m0")
    assert (NVFP4.group_columns, NVFP4.scale_dtype, NVFP4.global_scale) == (16, "e4m3", True)
    assert [a.tolerance for a in (UNQUANTIZED, MXFP8, NVFP4)] == [TOLERANCE, TOLERANCE, TOLERANCE_E2M1]
    assert (FP8_TOKEN.group_columns, FP8_GROUP128.group_columns, FP8_STATIC.static) == (None, 128, True)


def test_fast_accumulation_is_a_name_and_a_larger_error() -> None:
    known = {name: value for name, value in ACTIVATIONS.items() if value.fast_accumulation}
    assert list(known) == ["fp8_token_fast_accumulation", "fp8_static_fast_accumulation"]
    assert [value.promoted for value in known.values()] == [FP8_TOKEN, FP8_STATIC]
    assert {value.tolerance for value in known.values()} == {TOLERANCE_FAST_ACCUMULATION}
    assert FP8_GROUP128.promoted is FP8_GROUP128
    for other in (UNQUANTIZED, FP8_GROUP128, NVFP4):
        with pytest.raises(ArgumentError, match="fast_accumulation: expected E4M3 with one scale for a row"):
            replace(other, fast_accumulation=True)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="a granularity and a scale dtype together"):
        replace(FP8_TOKEN, granularity=None)
    with pytest.raises(ArgumentError, match="static: expected scales for a whole expert"):
        replace(FP8_STATIC, granularity=PerGroup(1, 128))
