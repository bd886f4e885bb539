"""Kernels for E4M3 weights and rows: run on a CPU from their own sources, and called as they are written."""

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
from polymoe.backends.reference import emulate_activations
from polymoe.kernels.cuda import modules, spec
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import compare_each_token, launches, quantized_rows, run_emulated
from support.cuda_emulator import Emulator, compile_unit
from support.problems import GPT_OSS, random_call, random_experts

W8A8_F16 = tuple(spec.W8A8_F16.tiles)
FORMAT = "fp8_block128"
UNIT = spec.W8A8_F16.unit(FORMAT)

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return {unit: compile_unit(unit) for unit in ("permute", "finalize", "quantize", UNIT)}


def experts(**kwargs: Any) -> ExpertWeights:
    return random_experts(FORMAT, **{"hidden": 384, "intermediate": 256, "experts": 2, **kwargs})


def run(*args: Any, rows: int, blocks: int = 3) -> Tensor:
    """The result on a GPU of ``blocks`` SMs, whose units for E4M3 would add coarsely."""
    config = CudaConfig("w8a8_f16", rows)
    return run_emulated(*args, config, blocks, coarse=True, activations="fp8_group128")[0]


def compare(*args: Any, rows: int, **kwargs: Any) -> None:
    """Every token with the reference."""
    compare_each_token(*args, CudaConfig("w8a8_f16", rows), activations="fp8_group128", **kwargs)


@emulated
@pytest.mark.parametrize("rows", W8A8_F16)
def test_every_single_token(monkeypatch: pytest.MonkeyPatch, libraries: Any, rows: int) -> None:
    weights = experts(hidden=512, experts=3)
    compare(monkeypatch, libraries, weights, *random_call(200, 512, 3, 2, torch.bfloat16), rows=rows)


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", W8A8_F16)
def test_every_configuration(monkeypatch: pytest.MonkeyPatch, libraries: Any, rows: int, dtype: torch.dtype) -> None:
    """Half a tile of `down`, rows of zeros, experts with more rows than a work tile holds, ids of other ranks."""
    x, routing = random_call(rows + 20, 384, 2, 2, dtype)
    x[5], x[6, :128], x[7, 128:] = 0, 0, 0
    routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
    routing.topk_weights_TA[0, 0] = float("nan")
    compare(monkeypatch, libraries, experts(bias=True), x, routing, rows=rows, activation=GPT_OSS)


@emulated
@pytest.mark.parametrize(("hidden", "intermediate", "top_k"), [(128, 128, 1), (256, 384, 22), (1152, 128, 2)])
@pytest.mark.parametrize("rows", W8A8_F16)
def test_sizes(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, rows: int, hidden: int, intermediate: int, top_k: int
) -> None:
    weights = experts(hidden=hidden, intermediate=intermediate, experts=3)
    call = random_call(6, hidden, 3, top_k, torch.bfloat16)
    compare(monkeypatch, libraries, weights, *call, rows=rows, blocks=5, activation=GeGLU("tanh"))


@emulated
def test_every_width(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    weights = experts(hidden=128, intermediate=128, experts=1)
    for rows in W8A8_F16:
        for tokens in range(8, rows + 8, 8):
            x, routing = random_call(tokens, 128, 1, 1, torch.bfloat16)
            compare(monkeypatch, libraries, weights, x, routing, rows=rows)


@emulated
def test_limits_of_the_activation_and_extreme_numbers(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """Columns of x and blocks of h that are many powers of two apart, and h that is zero everywhere."""
    weights = experts()
    x, routing = random_call(12, 384, 2, 2, torch.float32)
    x *= 2.0 ** torch.randint(-30, 4, (12, 3)).repeat_interleave(128, 1)
    x[3] *= 2.0**-90
    for activation in (SwiGLU(limit=0.5), SwiGLU(alpha=1.702, beta=1.0), GeGLU("none")):
        compare(monkeypatch, libraries, weights, x, routing, rows=32, activation=activation)
    x[:] = 0
    assert not run(monkeypatch, libraries, weights, x, routing, rows=32).any()


@emulated
def test_a_token_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """In every width, alone and among others, on any number of SMs: bitwise identical."""
    weights = experts(bias=True, experts=5)
    x, routing = random_call(60, 384, 5, 3, torch.bfloat16)
    whole = run(monkeypatch, libraries, weights, x, routing, rows=W8A8_F16[-1])
    for rows in W8A8_F16:
        for some in (slice(0, 1), slice(31, 38), slice(3, 60)):
            part = Routing(*(values[some] for values in routing))
            assert torch.equal(run(monkeypatch, libraries, weights, x[some], part, rows=rows, blocks=2), whole[some])


@emulated
@pytest.mark.parametrize("tokens", [1, 40])
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any, tokens: int) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    x, routing = random_call(tokens, 384, 2, 2, torch.bfloat16)
    ids = torch.full_like(routing.topk_ids_TA, -1)
    assert not run(monkeypatch, libraries, experts(), x, Routing(ids, routing.topk_weights_TA), rows=32).any()


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [128, 384, 1024, 8320])
def test_rows_are_rounded_as_the_reference_rounds_them(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, columns: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(modules, "kernel", Emulator(libraries, []))
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2, :128], x[3] = 0, 1e-3 * torch.arange(columns).to(dtype)
    out = quantized_rows("quantize_rows", x)
    codes = out[:, :columns].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    scales = out[:, columns : columns + columns // 32].contiguous().view(torch.float32)
    assert torch.equal((codes * scales[:, :, None]).flatten(1), emulate_activations(x.float(), "fp8_group128"))


@pytest.mark.parametrize("rows", W8A8_F16)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    config = CudaConfig("w8a8_f16", rows)
    made, tensors = launches(monkeypatch, FORMAT, config, sizes=(384, 256), activations="fp8_group128")
    gemms = [spec.W8A8_F16.kernel(part, rows) for part in ("gate_up", "down")]
    assert [name for name, *_ in made] == ["permutation_one_warp", "quantize_rows", *gemms, "finalize_bf16"]
    _, quantize, up, down, _ = made
    assert (quantize.args["columns"], quantize.args["x_dtype"]) == (384, 1)  # float16, as it came
    assert (quantize.grid, quantize.threads) == ((10, 1), 32)
    assert (up.args["n"], up.args["k"], up.args["top_k"]) == (512, 384, 3)
    assert (down.args["n"], down.args["k"], down.args["top_k"]) == (384, 256, 0)
    assert up.args["scales_stride"] * 5 == tensors["up.scales"].numel() == 5 * 4 * 3 * 4
    for _, args, grid, threads, shared in (up, down):
        assert grid == (132, 1)
        assert threads == 384
        assert 3 <= args["stages"] <= 16
        stage = 256 * 128 + rows * 264
        assert args["stages"] * stage <= shared - 1024
        assert shared + rows * 40 + 256 <= 227 * 1024


@pytest.mark.parametrize("rows", W8A8_F16)
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_instructions_and_products_under_way(part: str, rows: int) -> None:
    """At 4.3 TB/s an SM gets eight weights for each lane of a warp every 57 issue slots. Where the assembler
    cannot see that registers are safe, each product waits for itself: every one then ends a group (gsb0)."""
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    found = tools.disassembled(UNIT, spec.W8A8_F16.kernel(part, rows))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found), "spills"
    shortest: dict[int, list[str]] = {}  # by the width of wgmma, of loops over whole stages
    for body in tools.loops(found):
        widths = [int(width) for text in body for width in re.findall(r"HGMMA\.64x(\d+)x16", text)]
        if len(widths) == 16 and len(body) < len(shortest.get(widths[0], found)):
            shortest[widths[0]] = body
    assert max(shortest) == rows
    for width, body in shortest.items():
        assert len(body) <= 16 * (9.5 + width / 10)  # in a stage a warp has 16 times eight weights a lane
        assert len([text for text in body if "HGMMA" in text and "gsb0" in text]) == 8
        assert len([text for text in body if re.search(r"DEPBAR.*gsb0, 0x1", text)]) >= 7
