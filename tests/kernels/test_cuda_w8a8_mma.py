"""Kernels for E4M3 weights and few rows of x: run on a CPU from their own sources, and called as they are written."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda import spec
from polymoe.kernels.cuda.launch.shape import FEW_ROWS
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import compare_each_token, launches, run_emulated
from support.cuda_emulator import compile_unit
from support.problems import GPT_OSS, random_call, random_experts

FORMAT = "fp8_block128"
CONFIG, ORDERED = CudaConfig("w8a8_mma", 8), CudaConfig("w8a8_mma_ordered", 8)
both = pytest.mark.parametrize("config", [CONFIG, ORDERED], ids=lambda config: config.family)

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    families = (spec.W8A8_MMA, spec.W8A8_MMA_ORDERED, spec.W8A8_F16)
    units = ("permute", "finalize", "quantize", *(family.unit(FORMAT) for family in families))
    return {unit: compile_unit(unit) for unit in units}


def experts(**kwargs: Any) -> ExpertWeights:
    return random_experts(FORMAT, **{"hidden": 384, "intermediate": 256, "experts": 2, **kwargs})


def run(*args: Any, config: CudaConfig) -> Tensor:
    """The result on a GPU of three SMs."""
    return run_emulated(*args, config, activations="fp8_group128")[0]


def compare(*args: Any, config: CudaConfig = CONFIG, **kwargs: Any) -> list[str]:
    """Every token with the reference; returns the kernels launched."""
    return compare_each_token(*args, config, activations="fp8_group128", **kwargs)


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 16, 28])
def test_few_and_more_rows(monkeypatch: pytest.MonkeyPatch, libraries: Any, tokens: int, dtype: torch.dtype) -> None:
    """Rows that kernels sort and rows that a launch sorts; experts with more rows than a work tile holds, half a tile
    of the layout, rows of zeros, ids of other ranks."""
    x, routing = random_call(tokens, 384, 2, 2, dtype)
    x[-1, :128], x[tokens // 2, 128:] = 0, 0
    if tokens > 1:
        routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
        routing.topk_weights_TA[0, 0] = float("nan")
    made = compare(monkeypatch, libraries, experts(bias=True), x, routing, activation=GPT_OSS)
    gemms = ["w8a8_mma_gate_up_m8", "w8a8_mma_down_m8", "finalize_f32"]
    assert made == gemms if 2 * tokens <= FEW_ROWS else made[1:] == gemms


@emulated
@both
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k", "blocks"), [(128, 128, 1, 2), (256, 384, 22, 5), (2176, 128, 2, 40)]
)
def test_sizes(
    monkeypatch: pytest.MonkeyPatch,
    libraries: Any,
    config: CudaConfig,
    hidden: int,
    intermediate: int,
    top_k: int,
    blocks: int,
) -> None:
    """K of fewer blocks than warps and of more, more SMs than units, and one expert several times for a token."""
    weights = experts(hidden=hidden, intermediate=intermediate, experts=3)
    call = random_call(3, hidden, 3, top_k, torch.bfloat16)
    compare(monkeypatch, libraries, weights, *call, config=config, blocks=blocks, activation=GeGLU("tanh"))


@emulated
@both
def test_limits_of_the_activation_and_extreme_numbers(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig
) -> None:
    """Columns of x and blocks of h that are many powers of two apart, and h that is zero everywhere."""
    weights = experts()
    x, routing = random_call(6, 384, 2, 2, torch.float32)
    x *= 2.0 ** torch.randint(-30, 4, (6, 3)).repeat_interleave(128, 1)
    x[3] *= 2.0**-90
    for activation in (SwiGLU(limit=0.5), SwiGLU(alpha=1.702, beta=1.0), GeGLU("none")):
        compare(monkeypatch, libraries, weights, x, routing, config=config, activation=activation)
    x[:] = 0
    assert not run(monkeypatch, libraries, weights, x, routing, config=config).any()


@emulated
@pytest.mark.parametrize(
    ("hidden", "intermediate", "activation"),
    [(128, 384, GeGLU("tanh")), (384, 256, GPT_OSS), (2432, 128, SwiGLU())],
)
def test_same_bits_as_with_more_rows(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, hidden: int, intermediate: int, activation: Any
) -> None:
    """One, two and sixteen warps that share a unit; work tiles of eight rows, three and one."""
    weights = experts(hidden=hidden, intermediate=intermediate, bias=True)
    for tokens in (9, 11):
        x, routing = random_call(tokens, hidden, 2, 2, torch.float32)
        x[1] *= 2.0**-120
        results = [
            run_emulated(
                monkeypatch, libraries, weights, x, routing, config, activations="fp8_group128", activation=activation,
                aligned=True,
            )[0]
            for config in (ORDERED, CudaConfig("w8a8_f16", 32))
        ]  # fmt: skip
        assert torch.equal(*results)


@emulated
@both
@pytest.mark.parametrize("tokens", [1, 40])
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig, tokens: int) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    x, routing = random_call(tokens, 384, 2, 2, torch.bfloat16)
    ids = torch.full_like(routing.topk_ids_TA, -1)
    assert not run(monkeypatch, libraries, experts(), x, Routing(ids, routing.topk_weights_TA), config=config).any()


@both
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    made, tensors = launches(monkeypatch, FORMAT, config, sizes=(384, 256), activations="fp8_group128")
    gemms = [config.kernels.kernel(part, 8) for part in ("gate_up", "down")]
    assert [name for name, *_ in made] == [*gemms, "finalize_f32"]
    up, down, finalize = made
    assert up.args["ids"] == down.args["ids"] == finalize.args["ids"]
    assert (up.args["x_dtype"], up.args["rows"], up.args["experts"], up.args["long_ids"]) == (1, 30, 5, 1)
    assert (up.args["n"], up.args["k"], up.args["top_k"]) == (512, 384, 3)
    assert (down.args["n"], down.args["k"], down.args["top_k"]) == (384, 256, 0)
    assert up.args["scales_stride"] * 5 == tensors["up.scales"].numel() == 5 * 4 * 3 * 4
    for _, args, grid, threads, shared in (up, down):
        assert (grid, threads, args["stages"]) == ((132, 1), 512, 2)
        copies = {384: 8, 256: 8}[args["k"]]  # two warps share a unit
        sums = 17408 if config is ORDERED else 16384
        assert shared == 2 * 65536 + 2 * sums + copies * args["k"] // 128 * 1056


@both
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_instructions(config: CudaConfig, part: str) -> None:
    """At 4.3 TB/s an SM gets a block of 4 KB every 230 clocks, 920 issue slots. The longest loop over blocks is that of
    float32 rows with all their divisions."""
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    family = config.kernels
    found = tools.disassembled(family.unit(FORMAT), family.kernel(part, 8))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found), "spills"
    bodies = [body for body in tools.loops(found) if len([t for t in body if t.startswith("HMMA")]) == 16]
    assert bodies
    assert min(map(len, bodies)) <= 700
