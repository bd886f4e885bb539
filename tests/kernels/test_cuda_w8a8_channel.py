"""Kernels for E4M3 weights with one scale per row, or one in all: run on a CPU from their own sources."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda import spec
from polymoe.problem.activations import GeGLU
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import compare_each_token, launches, run_emulated
from support.cuda_emulator import compile_unit
from support.problems import GPT_OSS, problem_of, random_call, random_experts, with_input_scales

FAMILIES = (spec.W8A8_MMA_CHANNEL, spec.W8A8_MMA_ORDERED_CHANNEL, spec.W8A8_F16_CHANNEL, spec.W8A8_CHANNEL)
CONFIGS = [CudaConfig(family.name, rows) for family in FAMILIES for rows in family.tiles]
FORMAT = "fp8_channel"

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.family}-{config.block_m}")


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return {
        unit: compile_unit(unit) for unit in ("permute", "finalize", "quantize", *(f.unit(FORMAT) for f in FAMILIES))
    }


def experts(format: str = FORMAT, **kwargs: Any) -> ExpertWeights:
    return with_input_scales(random_experts(format, **{"hidden": 384, "intermediate": 256, "experts": 2, **kwargs}))


def compare(
    monkeypatch: pytest.MonkeyPatch,
    libraries: dict[str, ctypes.CDLL],
    weights: ExpertWeights,
    call: Any,
    config: CudaConfig,
    blocks: int = 3,
    **kwargs: Any,
) -> list[str]:
    """Every token with the reference, or the whole where tensor cores add coarsely; returns the kernels launched."""
    kwargs = {"activations": "fp8_token", **kwargs}
    x, routing = call
    if config.family != "w8a8_channel":
        return compare_each_token(monkeypatch, libraries, weights, x, routing, config, blocks, **kwargs)
    out, made = run_emulated(monkeypatch, libraries, weights, x, routing, config, blocks, coarse=True, **kwargs)
    assert relative_error(out, run_experts(problem_of(weights, **kwargs), weights, x, routing)) < TOLERANCE
    return made


@emulated
@every_config
@pytest.mark.parametrize("activations", ["fp8_token", "fp8_static"])
def test_every_configuration(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig, activations: str
) -> None:
    """Half a tile of `down`, zeros, experts with more rows than a work tile holds, ids of other ranks, biases."""
    tokens = 20 if config.block_m == 8 else config.block_m + 20
    x, routing = random_call(tokens, 384, 2, 2, torch.bfloat16)
    x[5], x[6, :128] = 0, 0
    routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
    routing.topk_weights_TA[0, 0] = float("nan")
    compare(
        monkeypatch, libraries, experts(bias=True), (x, routing), config, activations=activations, activation=GPT_OSS
    )


@emulated
@every_config
@pytest.mark.parametrize("activations", ["fp8_token", "fp8_static"])
def test_without_a_gate_and_one_scale_in_all(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig, activations: str
) -> None:
    """With ReLU squared; K of fewer blocks than warps and of more; float32 x."""
    for hidden, intermediate in ((128, 384), (2176, 128)):
        weights = experts("fp8_tensor", hidden=hidden, intermediate=intermediate, experts=3, gated=False)
        call = random_call(40 if config.family == "w8a8_channel" else 6, hidden, 3, 3, torch.float32)
        compare(monkeypatch, libraries, weights, call, config, blocks=5, activations=activations)


@emulated
@pytest.mark.parametrize(
    ("hidden", "gated", "kwargs"),
    [
        (384, True, {"activations": "fp8_token", "activation": GPT_OSS}),
        (384, False, {"activations": "fp8_static"}),
        (256, True, {"activations": "fp8_token", "activation": GeGLU("tanh"), "weight_on": "input"}),
        pytest.param(2432, True, {"activations": "fp8_token"}, marks=pytest.mark.slow),
    ],
)
def test_few_rows_have_the_bits_of_more(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, hidden: int, gated: bool, kwargs: dict[str, Any]
) -> None:
    weights = experts(hidden=hidden, intermediate=128, gated=gated, bias=True)
    x, routing = random_call(5, hidden, 2, 1 if "weight_on" in kwargs else 2, torch.float32)
    x[1] *= 2.0**-120
    results = [
        run_emulated(monkeypatch, libraries, weights, x, routing, config, aligned=True, **kwargs)[0]
        for config in CONFIGS[1:3]
    ]
    assert torch.equal(*results)


@emulated
@every_config
def test_routing_weights_on_the_input(monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig) -> None:
    call = random_call(40 if config.family == "w8a8_channel" else 3, 384, 2, 1, torch.float16)
    made = compare(monkeypatch, libraries, experts(), call, config, weight_on="input", activation=GeGLU("tanh"))
    family = config.kernels
    gemms = [family.kernel(part, config.block_m) for part in ("gate_up", "down")]
    if config.block_m == 8:
        assert made == [*gemms, "finalize_f32"]
    else:
        rounds = "quantize_whole_rows"
        assert made[1:-1] == [rounds, gemms[0], rounds, gemms[1]]
        assert made[-1] in ("finalize_bf16", "finalize_many_bf16")


@emulated
@every_config
def test_x_that_is_rounded_already(monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig) -> None:
    """Bitwise what comes of the same x in bfloat16, which the kernels round."""
    x, routing = random_call(5, 384, 2, 2, torch.float32)
    scales = x.abs().amax(1, keepdim=True) / 448
    codes = (x / scales).to(torch.float8_e4m3fn)
    scales = 2.0 ** scales.log2().round()
    weights = experts()
    as_float = codes.float() * scales
    as_float[:, 0] = 448 * scales[:, 0]
    codes[:, 0] = 448
    kwargs: Any = {"activations": "fp8_token"}
    whole, _ = run_emulated(monkeypatch, libraries, weights, as_float.bfloat16(), routing, config, **kwargs)
    out = run_emulated(
        monkeypatch, libraries, weights, codes, routing, config, options={"x_scales": scales}, out_dtype=torch.bfloat16,
        **kwargs,
    )[0]  # fmt: skip
    assert torch.equal(out, whole)


@emulated
@every_config
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    for activations in ("fp8_token", "fp8_static"):
        x, routing = random_call(20, 384, 2, 2, torch.bfloat16)
        routing.topk_ids_TA[:] = -1
        out, _ = run_emulated(monkeypatch, libraries, experts(), x, routing, config, activations=activations)
        assert not out.any()


@every_config
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    made, tensors = launches(monkeypatch, FORMAT, config, sizes=(384, 256), activations="fp8_token")
    assert tensors["up.scales"].shape == (5, 4 * 512)
    gemms = [m for m in made if m.name.startswith("w8a8")]
    for gemm in gemms:
        assert gemm.args["scales_stride"] == 4 * gemm.args["n"]
        assert gemm.shared <= 227 * 1024
    if config.block_m > 8:
        _, x, up, h, down, _ = made
        assert (x.grid, h.grid, x.args["top_k"], h.args["top_k"]) == ((2, 1), (4, 1), 3, 0)
        assert (up.args["x"], down.args["x"], h.args["x"]) == (x.args["out"], h.args["out"], up.args["out"])
        assert h.args["out"] - h.args["x"] == -(-30 * 256 * 4 // 256) * 256


@pytest.mark.parametrize("part", ["gate_up", "up", "down"])
@every_config
def test_no_register_is_spilled(config: CudaConfig, part: str) -> None:
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    family = config.kernels
    found = tools.disassembled(family.unit(FORMAT), family.kernel(part, config.block_m))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found)
