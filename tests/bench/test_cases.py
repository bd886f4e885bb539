"""Cases: their sizes in bytes, overrides, random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymoe.backends.cost import cost
from polymoe.bench.cases import CASES, Workload, case_named, random_weights
from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, FormatError
from polymoe.formats import FORMATS
from polymoe.machine import DEVICES
from polymoe.problem import Problem
from support.tiny import CPU, TINY

SUMS = "models/sums-gpt-oss-mxfp4"

# Microseconds on an H200 at 64 tokens, computed apart from this code with the experts that drawn routings hit.
FLOORS_64 = {"deepseek-v4-flash": 582.6, "gpt-oss-120b": 320.5, "deepseek-v3-tp8": 267.9, "qwen3-235b-tp4-bf16": 256.8}


def test_every_case_poses_a_problem() -> None:
    for case in CASES.values():
        problem = case.problem()
        fp8 = problem.spec.up.element == "e4m3"
        assert problem.activations.quantized == fp8, case.name
        assert problem.spec.format == case.format


@pytest.mark.parametrize(("name", "floor"), FLOORS_64.items())
def test_sizes_give_the_known_floors(name: str, floor: float) -> None:
    found = cost(case_named(name).problem(), DEVICES["h200"], 64, exponents=(0.0,))
    assert found.floor_us == pytest.approx(floor, rel=0.02)


def test_overrides_are_in_the_name() -> None:
    case = case_named("gpt-oss-120b")
    assert case.changed() == case
    assert case.changed(experts=128, bias=True).name == "gpt-oss-120b"
    small = case.changed(experts=3, hidden=64, bias=False)
    assert small.name == "gpt-oss-120b[H=64, E=3, no bias]"
    assert (small.experts, small.top_k, small.hidden, small.bias) == (3, 3, 64, False)
    assert not small.problem().spec.bias
    assert case.changed(experts=8, top_k=2).name == "gpt-oss-120b[E=8, A=2]"
    with pytest.raises(ArgumentError, match="top_k: expected at most 8, the number of experts, got 9"):
        case.changed(experts=8, top_k=9)
    with pytest.raises(ArgumentError, match=r"gate of .*H=33.*, mxfp4 matrix: expected an even number of columns"):
        case.changed(hidden=33).problem()


def test_unknown_names() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'kimi-k2'"):
        case_named("kimi-k22")
    with pytest.raises(ArgumentError, match="did you mean 'mxfp4'"):
        TINY.problem("mxpf4")
    with pytest.raises(ArgumentError, match="did you mean 'fp8_token'"):
        TINY.problem(activations="fp8_tokens")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_random_weights_have_the_format_and_a_sane_size(format: str) -> None:
    problem = TINY.changed(hidden=256, intermediate=128, bias=True).problem(format)
    weights = random_weights(problem, CPU)
    first, again, second = weights.expert(0), weights.expert(0), weights.expert(1)
    for name, n_inputs in (("gate", 256), ("up", 256), ("down", 128)):
        tensor = first.projections[name]
        assert tensor.encoding == FORMATS[format].encoding
        tensor.validate(name)
        numbers = tensor.dequantize()
        assert 0.5 < numbers.std() * n_inputs**0.5 < 2
        assert abs(numbers.mean()) < 0.15 * numbers.std()  # INT4 codes have one more below 0 than above
        assert torch.equal(numbers, again.projections[name].dequantize())
        assert not torch.equal(numbers, second.projections[name].dequantize())
        if tensor.scales is not None and tensor.scales.numel() > 1:
            assert len(tensor.scales.float().unique()) > 1
    assert first.up_bias is not None
    assert 0 < first.up_bias.float().std() < 1


def test_static_activations_come_with_scales() -> None:
    expert = random_weights(TINY.problem("fp8_tensor", "fp8_static"), CPU).expert(0)
    assert expert.gate_up_input_scale is not None
    assert expert.down_input_scale is not None


def test_a_checkpoints_layer() -> None:
    checkpoint = Checkpoint.open(SUMS)
    workload = Workload.of_checkpoint(checkpoint, 2, CPU)
    assert workload.case == "sums-gpt-oss-mxfp4:layer2"
    assert isinstance(workload.problem, Problem)
    assert not workload.problem.activations.quantized
    assert torch.equal(workload.weights.expert(3).up.codes, checkpoint.weights(2).expert(3).up.codes)
    assert Workload.of_checkpoint(checkpoint, None, CPU).case == "sums-gpt-oss-mxfp4:layer0"


def test_a_bad_scale_of_a_checkpoint_is_named_with_its_layer(tmp_path: Path) -> None:
    shutil.copytree(SUMS, tmp_path / "sums")
    shard = tmp_path / "sums" / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.2.mlp.experts.down_proj_scales"][3, 0, 0] = 0xFF
    save_file(tensors, shard)
    with pytest.raises(FormatError, match=r"^sums:layer2, expert 3 down scales: expected finite numbers"):
        Workload.of_checkpoint(Checkpoint.open(tmp_path / "sums"), 2, CPU)
