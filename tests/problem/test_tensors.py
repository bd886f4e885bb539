from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import support.plain_formats as plain
from polymoe.errors import ArgumentError, FormatError
from polymoe.formats import FORMATS, Encoding
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights

E, H, F = 3, 64, 96
MXFP4, NVFP4, BF16 = (FORMATS[name].encoding for name in ("mxfp4", "nvfp4", "bf16"))
SPEC = ExpertsSpec(hidden=H, intermediate=F, experts=E, gate=MXFP4, up=MXFP4, down=MXFP4)


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(format: str = "mxfp4", *, gated: bool = True, bias: bool = False) -> ExpertWeights:
    rows = 2 * F if gated else F
    return ExpertWeights.quantize(
        floats(E, rows, H),
        floats(E, H, F, seed=1),
        format,
        gated=gated,
        gate_up_bias_EF=floats(E, rows, seed=2).bfloat16() if bias else None,
        down_bias_EH=floats(E, H, seed=3).bfloat16() if bias else None,
    )


# --- ExpertsSpec ---


@pytest.mark.parametrize(
    ("gate", "up", "down", "name"),
    [
        (MXFP4, MXFP4, MXFP4, "mxfp4"),
        (None, NVFP4, NVFP4, "nvfp4"),
        (NVFP4, NVFP4, BF16, "nvfp4/bf16"),
        (None, NVFP4, BF16, "nvfp4/bf16"),
        (MXFP4, NVFP4, NVFP4, "mxfp4+nvfp4/nvfp4"),
        (MXFP4, BF16, MXFP4, "mxfp4+bf16/mxfp4"),
    ],
)
def test_format_names_every_encoding(gate: Encoding | None, up: Encoding, down: Encoding, name: str) -> None:
    assert replace(SPEC, gate=gate, up=up, down=down).format == name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_expert_bytes_are_those_of_an_expert(format: str, gated: bool, bias: bool) -> None:
    weights = layer(format, gated=gated, bias=bias)
    assert weights.spec.expert_bytes == weights.expert(0).nbytes


def test_dequantized_bytes() -> None:
    assert SPEC.dequantized_bytes == E * 3 * H * F * 2
    assert replace(SPEC, gate=None, local_experts=2).dequantized_bytes == 2 * 2 * H * F * 2


def test_local_experts_reach_to_the_end_unless_told() -> None:
    assert replace(SPEC, local_experts=-1, first_expert=1).local_experts == 2
    assert SPEC.local_experts == E


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "ExpertsSpec.hidden: expected at least 1, got 0"),
        ({"intermediate": -1}, "ExpertsSpec.intermediate"),
        ({"experts": 0, "local_experts": 1}, "ExpertsSpec.experts"),
        ({"local_experts": 0}, "ExpertsSpec.local_experts"),
        ({"first_expert": 1, "local_experts": 3}, "expected local experts within 0 to 3, got 3 from 1"),
        ({"first_expert": -1, "local_experts": 1}, "got 1 from -1"),
        ({"first_expert": 4, "local_experts": -1}, "ExpertsSpec.local_experts"),
    ],
)
def test_specs_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(SPEC, **change)


# --- Expert ---


def test_an_expert_moves_as_a_whole() -> None:
    expert = replace(layer(bias=True).expert(0), down_input_scale=torch.tensor(0.5)).to("meta")
    parts = [p.codes for p in expert.projections.values()] + list(expert.vectors.values())
    assert len(parts) == 7
    assert {p.device.type for p in parts} == {"meta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_bias": torch.zeros(H)}, r"gate_bias: expected shape \[96\], got \[64\]"),
        ({"up_bias": torch.zeros(2 * F)}, r"up_bias: expected shape \[96\], got \[192\]"),
        ({"down_bias": torch.zeros(F)}, r"down_bias: expected shape \[64\], got \[96\]"),
        ({"down_input_scale": torch.ones(1)}, r"down_input_scale: expected shape \[\], got \[1\]"),
        ({"gate": FORMATS["mxfp4"].quantize(torch.ones(F - 2, H))}, r"gate: expected shape \[96, 64\], got \[94, 64\]"),
        ({"down": FORMATS["mxfp4"].quantize(torch.ones(F, H))}, r"down: expected shape \[64, 96\], got \[96, 64\]"),
    ],
)
def test_parts_of_an_expert_fit_together(change: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        replace(layer(bias=True).expert(0), **change)  # type: ignore[arg-type]


# --- ExpertWeights ---


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gated", [True, False])
def test_dequantize_is_in_natural_order(format: str, gated: bool) -> None:
    weights = layer(format, gated=gated)
    gate_up, down = weights.dequantize(torch.float64)
    assert gate_up.shape == (E, 2 * F if gated else F, H)
    assert down.shape == (E, H, F)
    for e, expert in enumerate(weights):
        assert (down[e].numpy() == plain.weights(expert.down)).all()
        assert (gate_up[e, -F:].numpy() == plain.weights(expert.up)).all()
        if expert.gate is not None:
            assert (gate_up[e, :F].numpy() == plain.weights(expert.gate)).all()


def test_quantize_keeps_gate_and_up_apart() -> None:
    """Halves are quantized as matrices of their own: NVFP4 gives each its own global scale."""
    gate_up = floats(E, 2 * F, H)
    gate_up[:, :F] *= 100
    weights = ExpertWeights.quantize(gate_up, floats(E, H, F), "nvfp4")
    expert = weights.expert(2)
    assert expert.gate is not None
    assert expert.gate.global_scale is not None
    assert expert.up.global_scale is not None
    assert 50 < expert.gate.global_scale / expert.up.global_scale < 200
    back, _ = weights.dequantize()
    assert (back - gate_up)[:, :F].norm() < 0.12 * gate_up[:, :F].norm()
    assert (back - gate_up)[:, F:].norm() < 0.12 * gate_up[:, F:].norm()


def test_the_spec_comes_from_the_experts() -> None:
    experts = list(layer(bias=True))
    weights = ExpertWeights.of(experts, total=8, first_expert=4)
    assert weights.spec == replace(SPEC, bias=True, experts=8, first_expert=4, local_experts=3)
    assert weights.expert(2) is experts[2]
    assert list(weights) == experts


def test_one_bias_is_a_bias() -> None:
    """The down bias is added by one rank only; the others still have those of gate and up."""
    expert = replace(layer(bias=True).expert(0), down_bias=None)
    assert ExpertWeights.of([expert]).spec.bias


@pytest.mark.parametrize("e", [-1, E])
def test_experts_out_of_range(e: int) -> None:
    with pytest.raises(ArgumentError, match=f"expert: expected 0 to 2, got {e}"):
        layer().expert(e)


def test_experts_are_read_when_asked_for() -> None:
    asked: list[int] = []
    source = layer()

    def read(e: int) -> Expert:
        asked.append(e)
        return source.expert(e)

    weights = ExpertWeights(source.spec, read)
    assert asked == []
    weights.expert(2)
    assert asked == [2]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (layer("nvfp4").expert(0), "expert 0 (down|gate|up): expected .*e8m0.*, got .*e4m3"),
        (layer(gated=False).expert(0), "expert 0 gate: .*got none"),
        (
            ExpertWeights.quantize(torch.ones(1, 2 * F, 32), torch.ones(1, 32, F), "mxfp4").expert(0),
            r"\[32, 96\]|\[96, 32\]",
        ),
    ],
    ids=["encoding", "no-gate", "width"],
)
def test_experts_are_what_the_spec_says(other: Expert, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        ExpertWeights(SPEC, lambda e: other).expert(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "mxpf4"}, "format: got 'mxpf4'\n  hint: did you mean 'mxfp4'"),
        ({"gated": False}, r"gate_up_EFH: expected shape \[3, 96, 64\], got \[3, 192, 64\]"),
        ({"down_EHF": torch.ones(H, F)}, r"down_EHF: expected shape \[E, H, F\], got \[64, 96\]"),
        ({"down_EHF": torch.ones(E + 1, H, F)}, r"gate_up_EFH: expected shape \[4, 192, 64\]"),
        ({"gate_up_bias_EF": torch.ones(E, F)}, r"gate_up_bias_EF: expected shape \[3, 192\], got \[3, 96\]"),
        ({"down_bias_EH": torch.ones(H)}, r"down_bias_EH: expected shape \[3, 64\], got \[64\]"),
        (
            {"down_bias_EH": torch.ones(E, H)},
            "bias: expected both gate_up_bias_EF and down_bias_EH, or neither, got one",
        ),
    ],
)
def test_quantize_refuses(arguments: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"gate_up_EFH": torch.ones(E, 2 * F, H), "down_EHF": torch.ones(E, H, F)}
    with pytest.raises(ArgumentError, match=message):
        ExpertWeights.quantize(**{**good, **arguments})  # type: ignore[arg-type]


def test_a_layer_has_experts() -> None:
    with pytest.raises(ArgumentError, match="experts: expected at least one, got none"):
        ExpertWeights.of([])
    with pytest.raises(ArgumentError, match="local experts within 0 to 2"):
        ExpertWeights.of(list(layer()), total=2)
