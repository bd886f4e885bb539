"""MXFP4 weights decoded to shared memory: bitwise what w4a8 computes, run on a CPU from their own sources."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.formats import QuantTensor
from polymoe.kernels.cuda.spec import W4A8, W4A8_SHARED
from polymoe.machine import Machine
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from support.cuda_calls import launches, run_emulated
from support.cuda_emulator import compile_unit
from support.problems import GPT_OSS, problem_of, random_call, random_experts

CONFIG, SAME = CudaConfig("w4a8_shared", 128), CudaConfig("w4a8", 128)
UNIT = W4A8_SHARED.unit("mxfp4")

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return {unit: compile_unit(unit) for unit in ("permute", "finalize", "quantize", W4A8.unit("mxfp4"), UNIT)}


def compare(
    monkeypatch: pytest.MonkeyPatch,
    libraries: dict[str, ctypes.CDLL],
    weights: ExpertWeights,
    x: Tensor,
    routing: Routing,
    blocks: int = 3,
    **kwargs: Any,
) -> Tensor:
    """The result on a GPU of ``blocks`` SMs, with sums of 14 bits, which is that of w4a8."""
    kwargs |= {"activations": "fp8_group128", "coarse": True}
    expected, _ = run_emulated(monkeypatch, libraries, weights, x, routing, SAME, 3, **kwargs)
    out, made = run_emulated(monkeypatch, libraries, weights, x, routing, CONFIG, blocks, **kwargs)
    assert [name for name in made if "w4a8" in name] == [W4A8_SHARED.kernel(part, 128) for part in ("gate_up", "down")]
    assert bool(expected.isfinite().all())
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), (out != expected).sum()
    return out


def scaled(weights: ExpertWeights, steps: int) -> ExpertWeights:
    """Scales of a row up to 2**steps apart, groups of zeros with any scale, and a scale for each expert."""

    def spread(q: QuantTensor) -> QuantTensor:
        assert q.scales is not None
        g = torch.Generator().manual_seed(q.scales.numel())
        scales = q.scales.view(torch.uint8)
        scales = scales.amax(1, keepdim=True) - torch.randint(0, steps + 1, scales.shape, generator=g).byte()
        zeros = torch.rand(scales.shape, generator=g) < 0.1
        anything = torch.tensor([0, 150], dtype=torch.uint8)[torch.randint(0, 2, scales.shape, generator=g)]
        codes = q.codes.masked_fill(zeros.repeat_interleave(16, 1), 0)
        return replace(q, codes=codes, scales=torch.where(zeros, anything, scales).view(q.scales.dtype))

    def read(e: int) -> Expert:
        expert = weights.expert(e)
        return replace(expert, **{name: spread(q) for name, q in expert.projections.items()})

    return ExpertWeights(weights.spec, read)


@emulated
@pytest.mark.parametrize("steps", [11, 14])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (320, 192), (448, 320)])
def test_bits_are_those_of_w4a8(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, hidden: int, intermediate: int, steps: int
) -> None:
    """Whole tiles and halves, of rows and of columns; more stages than a pipeline has; magnitudes that are computed and
    looked up; rows of zeros. Of this rank's experts, which are the second to the fifth, the second has no row, the
    third all, more than a work tile takes, the fourth a few, and the fifth one."""
    weights = scaled(random_experts(hidden=hidden, intermediate=intermediate, experts=4, bias=True), steps)
    weights = ExpertWeights(replace(weights.spec, experts=6, first_expert=1, local_experts=4), weights.expert)
    x, routing = random_call(170, hidden, 6, 2, torch.bfloat16)
    ids = routing.topk_ids_TA
    ids[:, 0] = 2
    ids[:, 1] = torch.where(torch.arange(len(x)) % 5 == 4, 3, 0)
    ids[7, 1], ids[8:11, 1] = 4, torch.tensor([-1, 5, 6])
    x[5], x[6, :64] = 0, 0
    compare(monkeypatch, libraries, weights, x, routing, activation=GPT_OSS)


@emulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("activation", [GeGLU("tanh"), SwiGLU(limit=0.5), SwiGLU(alpha=1.702, beta=1.0)], ids=str)
def test_other_activations_and_inputs(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, activation: Any, dtype: torch.dtype
) -> None:
    """Few rows of many experts, of which each token takes 22, on more SMs than there are tiles."""
    weights = random_experts(hidden=128, intermediate=192, experts=24)
    compare(monkeypatch, libraries, weights, *random_call(3, 128, 24, 22, dtype), blocks=50, activation=activation)


@emulated
def test_scales_of_experts(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """Those of gate, up and down differ."""
    plain = random_experts(hidden=192, intermediate=128, experts=3, bias=True)

    def read(e: int) -> Expert:
        expert = plain.expert(e)
        scaled = {}
        for i, (name, q) in enumerate(expert.projections.items()):
            encoding = replace(q.encoding, global_scale=True)
            scaled[name] = replace(q, encoding=encoding, global_scale=torch.tensor(0.3 + 0.6 * i + e))
        return replace(expert, **scaled)

    weights = ExpertWeights.of([read(e) for e in range(3)])
    x, routing = random_call(20, 192, 3, 2, torch.bfloat16)
    out = compare(monkeypatch, libraries, weights, x, routing)
    assert not torch.equal(out, compare(monkeypatch, libraries, plain, x, routing))


@emulated
def test_every_number_of_rows(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """From one row of a work tile to as many as it holds, and one more: two work tiles."""
    weights = random_experts(hidden=128, intermediate=64, experts=1)
    for tokens in (1, 8, 63, 64, 65, 127, 128, 129):
        compare(monkeypatch, libraries, weights, *random_call(tokens, 128, 1, 1, torch.bfloat16))


@emulated
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    weights = random_experts(hidden=128, intermediate=64, experts=2)
    x, routing = random_call(20, 128, 2, 2, torch.bfloat16)
    routing.topk_ids_TA[:] = -1
    assert not compare(monkeypatch, libraries, weights, x, routing).any()


def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    made, tensors = launches(monkeypatch, "mxfp4", CONFIG, sizes=(4160, 320), activations="fp8_group128")
    gemms = [W4A8_SHARED.kernel(part, 128) for part in ("gate_up", "down")]
    assert [name for name, *_ in made] == ["permutation_one_warp", "quantize_permuted", *gemms, "finalize_bf16"]
    _, x, up, down, combine = made
    assert (x.args["out"], up.args["out"], down.args["out"]) == (up.args["x"], down.args["x"], combine.args["y"])
    assert (up.args["n"], up.args["k"], down.args["n"], down.args["k"]) == (640, 4160, 4160, 320)
    assert up.args["codes_stride"] * 5 == tensors["up.codes"].numel()
    for gemm in (up, down):
        assert (gemm.grid, gemm.threads, gemm.args["stages"]) == ((132, 1), 512, 3)
        assert gemm.shared == 3 * 66 * 1024 + 1024 + 128


def test_nothing_chooses_it_but_measurements() -> None:
    """It never ran on a GPU."""
    problem = problem_of(random_experts(hidden=128, intermediate=64), activations="fp8_group128")
    for gpu in ("h100", "h200"):
        machine = Machine.of(gpu)
        found = {Cuda().configure(problem, machine, 2**n).kernel_family for n in range(18)}
        assert found == {"w4a8"}
        assert CONFIG in Cuda().tuning_configs(problem, machine, 4096)


@pytest.mark.parametrize("part", W4A8_SHARED.parts)
def test_instructions_of_a_stage(part: str) -> None:
    """Shared memory has work for 1480 cycles of a stage, in which a scheduler has one warp that decodes and two that
    multiply: 128 sums of a lane are accumulated, and barriers and descriptors take half as many instructions as that.
    Weights are decoded by computed magnitudes, or else by looking them up."""
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    found = tools.disassembled(UNIT, W4A8_SHARED.kernel(part, 128))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found), "spills"
    multiplying, decoding = [], []
    for body in tools.loops(found):
        chains = len([text for text in body if "QGMMA.64x128x32" in text]) // 4
        if len(body) < 300 and chains:
            multiplying.append(chains)
            assert len([text for text in body if text.startswith("FFMA")]) == 64 * chains
            assert len(body) <= 64 * chains + 70
        if sum(text.startswith("STSM") for text in body) == 2 * 16:
            decoding.append(len(body))
    assert sorted(multiplying) == [1, 2]
    assert min(decoding) <= 2 * 430
