"""Kernels for E4M3 weights and many E4M3 rows: run on a CPU from their own sources, and called as they are written."""

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

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda import modules, spec
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES
from polymoe.kernels.cuda.targets import SM90
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import gpu, launches, pack, run_emulated
from support.cuda_emulator import Emulator, compile_unit
from support.problems import GPT_OSS, problem_of, random_call, random_experts

FAMILIES = {rows: family for family in (spec.W8A8, spec.W8A8_SHARED) for rows in family.tiles}
W8A8 = tuple(FAMILIES)
UNITS = [family.unit("fp8_block128") for family in FAMILIES.values()]

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
both_sums = pytest.mark.parametrize("coarse", [False, True])
"""Sums of E4M3 products as the tensor cores of Hopper accumulate them, and exact ones."""


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return {unit: compile_unit(unit) for unit in ("permute", "finalize", "quantize", *UNITS)}


def experts(**kwargs: Any) -> ExpertWeights:
    return random_experts("fp8_block128", **{"hidden": 384, "intermediate": 256, "experts": 2, **kwargs})


def run(
    monkeypatch: pytest.MonkeyPatch,
    libraries: dict[str, ctypes.CDLL],
    weights: ExpertWeights,
    x: Tensor,
    routing: Routing,
    rows: int = W8A8[-1],
    blocks: int = 3,
    coarse: bool = True,
    **kwargs: Any,
) -> Tensor:
    """The result on a GPU of ``blocks`` SMs."""
    config = CudaConfig(FAMILIES[rows].name, rows)
    return run_emulated(
        monkeypatch, libraries, weights, x, routing, config, blocks, coarse, activations="fp8_group128", **kwargs
    )[0]


def compare(
    monkeypatch: pytest.MonkeyPatch,
    libraries: dict[str, ctypes.CDLL],
    weights: ExpertWeights,
    x: Tensor,
    routing: Routing,
    rows: int = W8A8[-1],
    blocks: int = 3,
    coarse: bool = True,
    most: float = TOLERANCE,
    **kwargs: Any,
) -> float:
    """The whole with the reference; returns its error."""
    out = run(monkeypatch, libraries, weights, x, routing, rows, blocks, coarse, **kwargs)
    expected = run_experts(problem_of(weights, activations="fp8_group128", **kwargs), weights, x, routing)
    error = relative_error(out, expected)
    assert error < most
    return error


@emulated
@both_sums
@pytest.mark.parametrize("rows", W8A8)
def test_every_configuration(monkeypatch: pytest.MonkeyPatch, libraries: Any, rows: int, coarse: bool) -> None:
    """Half a tile of `down`, rows of zeros, experts with more rows than a work tile holds, ids of other ranks."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, routing = random_call(rows + 20, 384, 2, 2, dtype)
        x[5], x[6, :128], x[7, 128:] = 0, 0, 0
        routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
        routing.topk_weights_TA[0, 0] = float("nan")
        compare(monkeypatch, libraries, experts(bias=True), x, routing, rows, coarse=coarse, activation=GPT_OSS)


@emulated
@both_sums
@pytest.mark.parametrize(("hidden", "intermediate", "top_k"), [(128, 128, 1), (256, 384, 22), (1152, 128, 2)])
@pytest.mark.parametrize("rows", W8A8)
def test_sizes(
    monkeypatch: pytest.MonkeyPatch,
    libraries: Any,
    rows: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    coarse: bool,
) -> None:
    """Of an odd number of tiles; experts of few rows, and of none; more SMs than tiles."""
    weights = experts(hidden=hidden, intermediate=intermediate, experts=3)
    x, routing = random_call(6, hidden, 2, top_k, torch.bfloat16)
    # A few rows of few columns: one number of h that fell to the other side shows.
    compare(
        monkeypatch, libraries, weights, x, routing, rows, blocks=19, coarse=coarse, activation=GeGLU("tanh"),
        most=2e-2 if coarse else TOLERANCE,
    )  # fmt: skip


@emulated
def test_every_width(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """From one row of a work tile to as many as it holds, and one more: two work tiles. Bitwise the same whether x is
    gathered or in permuted tiles."""
    weights = experts(hidden=256, intermediate=128, experts=1)
    for rows in W8A8:
        for tokens in (*range(1, rows, 13), rows - 1, rows, rows + 1):
            x, routing = random_call(tokens, 256, 1, 1, torch.bfloat16)
            tiles = run(monkeypatch, libraries, weights, x, routing, rows, coarse=False)
            with monkeypatch.context() as gathers:
                gathers.setitem(KERNEL_FAMILIES, FAMILIES[rows].name, replace(FAMILIES[rows], x=spec.W8A8.x[1:]))
                compare(monkeypatch, libraries, weights, x, routing, rows, coarse=False)
                assert torch.equal(tiles, run(monkeypatch, libraries, weights, x, routing, rows, coarse=False))


@emulated
@pytest.mark.parametrize("rows", W8A8)
def test_one_expert_a_token(monkeypatch: pytest.MonkeyPatch, libraries: Any, rows: int) -> None:
    """x in permuted tiles of several work tiles, whose pipeline wraps; on the same runner x that the caller quantized,
    which is by token."""
    weights = experts(hidden=1024, intermediate=384, experts=3)
    problem = problem_of(weights, activations="fp8_group128")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(2))
    packed = pack(problem, weights)
    emulator = Emulator(libraries, list(packed.tensors.values()))
    monkeypatch.setattr(modules, "kernel", emulator)
    runner, config = CudaRunner(problem, packed, SM90), CudaConfig(FAMILIES[rows].name, rows)
    for dtype in (torch.float32, torch.bfloat16):
        x, routing = random_call(400, 1024, 3, 1, dtype)
        routing.topk_ids_TA[7] = -1
        groups = x.float().unflatten(1, (-1, 128))
        scales = groups.abs().amax(2) / 448
        codes = (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
        out, again = (torch.full(x.shape, float("nan"), dtype=torch.bfloat16) for _ in range(2))
        runner.run(CallArguments(x, *routing, out), config)
        runner.run(CallArguments(codes, *routing, again, x_scales=scales), config)
        assert torch.equal(out, again)
        assert relative_error(out, run_experts(problem, weights, x, routing)) < TOLERANCE
    tiles, gathers = (
        [FAMILIES[rows].kernel(part, rows) for part in (first, "down")] for first in ("gate_up_tiles", "gate_up")
    )
    for made, quantize, gemms in (
        (emulator.made[:5], ["quantize_permuted"], tiles),
        (emulator.made[5:9], [], gathers),
    ):
        assert made == ["permutation_one_cta", *quantize, *gemms, "finalize_many_bf16"]


@emulated
def test_limits_of_the_activation_and_extreme_numbers(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """Columns of x and blocks of h that are many powers of two apart, and h that is zero everywhere."""
    weights = experts()
    x, routing = random_call(12, 384, 2, 2, torch.float32)
    x *= 2.0 ** torch.randint(-30, 4, (12, 3)).repeat_interleave(128, 1)
    x[3] *= 2.0**-90
    for activation in (SwiGLU(limit=0.5), SwiGLU(alpha=1.702, beta=1.0), GeGLU("none")):
        compare(monkeypatch, libraries, weights, x, routing, coarse=False, activation=activation)
    x[:] = 0
    assert not run(monkeypatch, libraries, weights, x, routing).any()


@emulated
@both_sums
def test_experts_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any, coarse: bool) -> None:
    """Of seven, the third to the fifth, of which one has nothing to do and one has almost all."""
    weights = experts(experts=3)
    weights = ExpertWeights(replace(weights.spec, experts=7, first_expert=2, local_experts=3), weights.expert)
    x, routing = random_call(170, 384, 7, 2, torch.bfloat16)
    routing.topk_ids_TA[routing.topk_ids_TA == 3] = 4
    routing.topk_ids_TA[:150, 1] = 2
    compare(monkeypatch, libraries, weights, x, routing, coarse=coarse)


@emulated
@both_sums
@pytest.mark.parametrize("rows", W8A8)
def test_a_token_does_not_depend_on_its_batch(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, rows: int, coarse: bool
) -> None:
    """In every width, alone and among others, on any number of SMs: bitwise identical."""
    weights = experts(bias=True, hidden=256, intermediate=128)
    x, routing = random_call(170, 256, 2, 2, torch.bfloat16)
    whole = run(monkeypatch, libraries, weights, x, routing, rows, coarse=coarse)
    for some in (slice(0, 1), slice(31, 56), slice(3, 83), slice(20, 160)):
        part = Routing(*(values[some] for values in routing))
        out = run(monkeypatch, libraries, weights, x[some], part, rows, 2, coarse)
        assert torch.equal(out, whole[some])


@emulated
@pytest.mark.parametrize("tokens", [1, 40])
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any, tokens: int) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    x, routing = random_call(tokens, 384, 2, 2, torch.bfloat16)
    ids = torch.full_like(routing.topk_ids_TA, -1)
    assert not run(monkeypatch, libraries, experts(), x, Routing(ids, routing.topk_weights_TA)).any()


@pytest.mark.parametrize("rows", W8A8)
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    config = CudaConfig(FAMILIES[rows].name, rows)
    made, tensors = launches(monkeypatch, "fp8_block128", config, sizes=(384, 256), activations="fp8_group128")
    gemms = [FAMILIES[rows].kernel(part, rows) for part in ("gate_up", "down")]
    assert [name for name, *_ in made] == ["permutation_one_warp", "quantize_rows", *gemms, "finalize_bf16"]
    _, quantize, up, down, combine = made
    assert (quantize.args["columns"], quantize.args["x_dtype"]) == (384, 1)  # float16, as it came
    assert (quantize.grid, quantize.threads) == ((10, 1), 32)
    assert (quantize.args["out"], up.args["out"], down.args["out"]) == (up.args["x"], down.args["x"], combine.args["y"])
    assert (up.args["n"], up.args["k"], up.args["top_k"]) == (512, 384, 3)
    assert (down.args["n"], down.args["k"], down.args["top_k"]) == (384, 256, 0)
    assert up.args["scales_stride"] * 5 == tensors["up.scales"].numel() == 5 * 4 * 3 * 4
    for _, args, grid, threads, shared in (up, down):
        assert grid == (132, 1)
        assert threads == 384
        assert 4 <= args["stages"] <= 16
        # Of 128 columns 256 rows of weights, and of a row of x the codes and a scale.
        stage = -(-(256 * 128 + rows * 132) // 1024) * 1024
        assert args["stages"] * stage == shared - 1024
        assert shared + rows * 16 + 272 <= 227 * 1024


@pytest.mark.parametrize("rows", spec.W8A8.tiles)
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_instructions_of_a_stage(part: str, rows: int) -> None:
    """At 4.3 TB/s an SM gets a stage's weights in 1840 cycles, 7360 issue slots for its eight warps. Two chains of 128
    columns in each warp, of four wgmma that are waited for once."""
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    found = tools.disassembled(UNITS[0], spec.W8A8.kernel(part, rows))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found), "spills"
    widest = 0
    for body in tools.loops(found):
        widths = [int(width) for text in body for width in re.findall(r"QGMMA\.64x(\d+)x32", text)]
        if len(widths) in (8, 16) and len(body) < 1000:
            several = len(widths) // 8  # MMAs side by side, where one would be too wide
            widest = max(widest, several * widths[0])
            assert len(body) <= 150 + 40 * several + 1.7 * several * widths[0]
            assert len([text for text in body if "QGMMA" in text and "gsb0" in text]) == 2 * several
    assert widest == rows


@pytest.mark.parametrize("rows", spec.W8A8_SHARED.tiles)
@pytest.mark.parametrize("part", ["gate_up", "gate_up_tiles", "down"])
def test_instructions_of_a_stage_of_w8a8_shared(part: str, rows: int) -> None:
    """A chain of four wgmma takes the tensor cores 256 cycles, and two warps of a scheduler have chains at a time. Each
    accumulates 64 sums of a chain; scales, barriers and descriptors take less than that."""
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    found = tools.disassembled(UNITS[1], spec.W8A8_SHARED.kernel(part, rows))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found), "spills"
    most = 0
    for body in tools.loops(found):
        mmas = [text for text in body if "QGMMA.64x128x32" in text]
        if len(body) < 300 and mmas:
            chains = len(mmas) // 4
            most = max(most, chains)
            assert len([text for text in body if text.startswith("FFMA")]) == 64 * chains
            assert len(body) <= 64 * chains + 90
    assert most == rows // 64
