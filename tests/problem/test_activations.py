"""Activations: golden values, and the modules of Transformers."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from polymoe.errors import ArgumentError
from polymoe.problem.activations import HIDDEN_ACTS, Activation, GeGLU, ReLU2, SwiGLU, parse_activation

GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = SwiGLU(limit=10.0)


def value(activation: Activation, *inputs: float) -> float:
    return activation(*(torch.tensor(x, dtype=torch.float64) for x in inputs)).item()


@pytest.mark.parametrize(
    ("activation", "gate", "up", "expected"),
    [
        (GPT_OSS, 8, 9, 55.99963),
        (GPT_OSS, -8, -9, 5.85986e-5),
        (GPT_OSS, 1, 0.5, 1.268694),
        (DEEPSEEK_V4, 12, 11, 99.99546),
        (DEEPSEEK_V4, 1, 0.5, 0.3655293),
        (SwiGLU(), 1, 0.5, 0.3655293),
        (SwiGLU(), 12, 11, 12 * 11 / (1 + math.exp(-12))),
        (GeGLU(), 1, 2, 1 + math.erf(math.sqrt(0.5))),
        (GeGLU("tanh"), 1, 2, 1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715)),
    ],
)
def test_gated_golden_values(activation: SwiGLU | GeGLU, gate: float, up: float, expected: float) -> None:
    assert value(activation, gate, up) == pytest.approx(expected, rel=5e-7)


def test_limit_has_no_lower_clamp_on_the_gate() -> None:
    assert value(DEEPSEEK_V4, -40, 1) == pytest.approx(-40 / (1 + math.exp(40)))
    assert value(DEEPSEEK_V4, 1, -40) == value(SwiGLU(), 1, -10)


def test_relu2() -> None:
    assert [value(ReLU2(), x) for x in (-3.0, 0.0, 1.5)] == [0.0, 0.0, 2.25]


@pytest.mark.parametrize("activation", [SwiGLU(), GPT_OSS, GeGLU(), GeGLU("tanh"), ReLU2()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_dtype_and_shape_and_inputs(activation: Activation, dtype: torch.dtype) -> None:
    inputs = [torch.linspace(-12, 12, 24, dtype=dtype).view(3, 8) for _ in range(2 if activation.gated else 1)]
    before = [x.clone() for x in inputs]
    result = activation(*inputs)
    assert result.dtype == dtype
    assert result.shape == (3, 8)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert activation(*(x[:0] for x in inputs)).shape == (0, 8)


@pytest.mark.parametrize("activation", [SwiGLU(), GeGLU()])
def test_gated_refuses_broadcasting(activation: SwiGLU | GeGLU) -> None:
    with pytest.raises(ArgumentError, match=r"expected up of gate's shape \[3, 8\], got \[3, 1\]"):
        activation(torch.ones(3, 8), torch.ones(3, 1))


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (SwiGLU(), "swiglu"),
        (GPT_OSS, "swiglu(alpha=1.702, beta=1, limit=7)"),
        (SwiGLU(alpha=1, beta=0, limit=10), "swiglu(limit=10)"),
        (GeGLU(), "geglu"),
        (GeGLU("tanh"), "geglu(tanh)"),
        (ReLU2(), "relu2"),
    ],
)
def test_name(activation: Activation, name: str) -> None:
    assert activation.name == name


def test_values_are_hashable_and_compare_by_constants() -> None:
    assert {SwiGLU(limit=7), SwiGLU(limit=7.0), DEEPSEEK_V4} == {SwiGLU(limit=7.0), SwiGLU(limit=10.0)}


@pytest.mark.parametrize(
    ("constants", "field"),
    [
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": "1.7"}, "alpha"),
        ({"beta": math.inf}, "beta"),
        ({"beta": True}, "beta"),
        ({"beta": None}, "beta"),
        ({"limit": 0}, "limit"),
        ({"limit": -7.0}, "limit"),
        ({"limit": math.inf}, "limit"),
    ],
)
def test_swiglu_refuses_constants(constants: dict[str, float], field: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^SwiGLU\.{field}: expected a .*number"):
        SwiGLU(**constants)


def test_geglu_refuses_an_unknown_approximation() -> None:
    with pytest.raises(ArgumentError, match="'none' or 'tanh', got 'sigmoid'"):
        GeGLU("sigmoid")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("hidden_act", "options", "expected"),
    [
        ("silu", {}, SwiGLU()),
        ("swish", {"limit": 10.0}, DEEPSEEK_V4),
        ("silu", {"alpha": 1.702, "beta": 1.0, "limit": 7.0}, GPT_OSS),
        ("gelu", {}, GeGLU()),
        ("gelu_pytorch_tanh", {}, GeGLU("tanh")),
        ("relu2", {"gated": False}, ReLU2()),
    ],
)
def test_parse(hidden_act: str, options: dict[str, Any], expected: Activation) -> None:
    assert parse_activation(hidden_act, **options) == expected


@pytest.mark.parametrize(
    ("hidden_act", "options", "message"),
    [
        ("sillu", {}, "with a gate, got 'sillu'\n  hint: did you mean 'silu'. known: gelu, .*, silu, swish$"),
        ("softmoid", {"gated": False}, "without a gate, got 'softmoid'\n  hint: known: relu2$"),
        (None, {}, "got None\n  hint: .*known: gelu"),
        ("relu2", {}, "got 'relu2'\n  hint: 'relu2' is known for experts without a gate"),
        ("silu", {"gated": False}, "got 'silu'\n  hint: 'silu' is known for experts with a gate"),
        ("gelu", {"limit": 7.0}, r"expected silu, to which swiglu\(limit=7\) applies, got 'gelu'"),
        ("silu", {"limit": -1.0}, "SwiGLU.limit"),
    ],
)
def test_parse_refuses(hidden_act: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_activation(hidden_act, **options)


def test_table_is_sorted_and_read_only() -> None:
    assert list(HIDDEN_ACTS) == sorted(HIDDEN_ACTS)
    with pytest.raises(TypeError):
        HIDDEN_ACTS["mine"] = SwiGLU()  # pyright: ignore[reportIndexIssue]


def test_describing_needs_no_torch() -> None:
    code = "import sys; from polymoe.problem.activations import SwiGLU; SwiGLU().name; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("hidden_act", list(HIDDEN_ACTS))
def test_against_transformers_activation(hidden_act: str) -> None:
    act2fn = pytest.importorskip("transformers.activations").ACT2FN
    activation = HIDDEN_ACTS[hidden_act]
    gate, up = torch.randn(2, 64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    if isinstance(activation, ReLU2):
        ours, theirs = activation(up), act2fn[hidden_act](up)
    else:
        ours, theirs = activation(gate, up), act2fn[hidden_act](gate) * up
    # gelu_fast writes sqrt(2 / pi) with ten digits
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("module", "config", "experts", "activation", "interleaved"),
    [
        ("gpt_oss", "GptOssConfig", "GptOssExperts", GPT_OSS, True),
        ("deepseek_v4", "DeepseekV4Config", "DeepseekV4Experts", DEEPSEEK_V4, False),
    ],
)
def test_against_transformers_gate(
    module: str, config: str, experts: str, activation: SwiGLU, interleaved: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    with torch.device("meta"):  # its own default constants, without its weights
        theirs = getattr(modeling, experts)(getattr(transformers, config)())
    gate, up = torch.randn(2, 64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 12
    both = torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)
    torch.testing.assert_close(activation(gate, up), theirs._apply_gate(both), rtol=1e-12, atol=1e-12)
