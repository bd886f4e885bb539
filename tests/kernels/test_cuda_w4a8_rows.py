"""Kernels for 4-bit weights and rows in E4M3 with one scale per row: run on a CPU from their own sources."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.build import sources, unit_source
from polymoe.kernels.cuda.spec import W4A8_ROWS
from polymoe.kernels.cuda.targets import SM90
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from support.cuda_calls import compare_each_token, launches, run_emulated
from support.cuda_emulator import compile_files, compile_unit
from support.problems import GPT_OSS, problem_of, random_call, random_experts, with_input_scales

CONFIGS = [*(CudaConfig("w4a8_rows", rows) for rows in W4A8_ROWS.tiles), CudaConfig("w4a8_rows", 128, narrow_m=32)]

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return {unit: compile_unit(unit) for unit in ("permute", "finalize", "quantize", W4A8_ROWS.unit("mxfp4"))}


@emulated
@every_config
def test_every_configuration(monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig) -> None:
    """K of an odd number of half stages, tiles that are not whole, zeros, experts with more rows than a work tile
    has, ids of other ranks, biases; each token with the reference."""
    weights = with_input_scales(random_experts(hidden=320, intermediate=192, experts=2, bias=True))
    x, routing = random_call(config.block_m + 20, 320, 2, 2, torch.bfloat16)
    x[5], x[6, :128] = 0, 0
    routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
    routing.topk_weights_TA[0, 0] = float("nan")
    for mode in ("fp8_token", "fp8_static"):
        made = compare_each_token(
            monkeypatch, libraries, weights, x, routing, config, blocks=2, coarse=False, activations=mode,
            activation=GPT_OSS,
        )  # fmt: skip
        rows = [config.block_m, config.narrow_m] if config.narrow_m else [config.block_m]
        up, down = ([W4A8_ROWS.kernel(part, m) for m in rows] for part in ("gate_up", "down"))
        assert made[1:-1] == ["quantize_row_tiles", *up, "quantize_row_tiles", *down]
        assert made[-1] in ("finalize_bf16", "finalize_many_bf16")


@pytest.fixture(scope="module", params=["int4_g128", "int4_g128_zp"])
def int4(request: Any) -> tuple[str, dict[str, ctypes.CDLL]]:
    """A format, and its kernels with two of the tiles, in one width, which are compiled in seconds."""
    unit, files = W4A8_ROWS.unit(request.param), sources()
    tiles = {rows: replace(W4A8_ROWS.tiles[rows], widths=()) for rows in (32, 128)}
    files["instantiations/two_tiles.cu"] = unit_source(replace(W4A8_ROWS, tiles=tiles), request.param)
    library = compile_files(files, "instantiations/two_tiles.cu", ("GemmArgs",), f"{unit}_two_tiles")
    return request.param, {**{name: compile_unit(name) for name in ("permute", "finalize", "quantize")}, unit: library}


def every_code(format: str, **sizes: Any) -> ExpertWeights:
    """INT4 weights with every code, every zero point, and scales that are far apart."""
    g = torch.Generator().manual_seed(1)

    def changed(q: Any) -> Any:
        parts = {"codes": torch.randint(256, q.codes.shape, generator=g, dtype=torch.uint8)}
        parts["scales"] = (q.scales * 2.0 ** torch.randint(-3, 3, q.scales.shape, generator=g)).to(q.scales.dtype)
        if q.zero_points is not None:
            parts["zero_points"] = torch.randint(16, q.zero_points.shape, generator=g, dtype=torch.uint8)
        return replace(q, **parts)

    def read(e: int) -> Expert:
        expert = weights.expert(e)
        return replace(expert, **{name: changed(q) for name, q in expert.projections.items()})

    weights = random_experts(format, **sizes)
    return ExpertWeights.of([read(e) for e in range(weights.spec.experts)])


@emulated
@pytest.mark.parametrize("rows", [32, 128])
def test_int4(monkeypatch: pytest.MonkeyPatch, int4: Any, rows: int) -> None:
    """A last group of half a stage, tiles that are not whole, and more stages than a pipeline has."""
    format, libraries = int4
    weights = every_code(format, hidden=1472, intermediate=192, experts=2, bias=True)
    x, routing = random_call(20, 1472, 2, 2, torch.bfloat16)
    made = compare_each_token(
        monkeypatch, libraries, weights, x, routing, CudaConfig("w4a8_rows", rows), blocks=2, coarse=False,
        activations="fp8_token",
    )  # fmt: skip
    assert made[2:5:2] == [W4A8_ROWS.kernel(part, rows) for part in ("gate_up", "down")]


@pytest.mark.slow
@emulated
@every_config
@pytest.mark.parametrize("format", ["int4_g128", "int4_g128_zp"])
def test_every_configuration_of_int4(monkeypatch: pytest.MonkeyPatch, format: str, config: CudaConfig) -> None:
    """Every width; sums of 14 bits, which no group makes longer."""
    libraries = {unit: compile_unit(unit) for unit in ("permute", "finalize", "quantize", W4A8_ROWS.unit(format))}
    weights = with_input_scales(every_code(format, hidden=320, intermediate=192, experts=2, bias=True))
    x, routing = random_call(config.block_m + 20, 320, 2, 2, torch.bfloat16)
    for mode in ("fp8_token", "fp8_static"):
        kwargs: Any = {"activations": mode, "activation": GPT_OSS}
        compare_each_token(monkeypatch, libraries, weights, x, routing, config, blocks=2, coarse=False, **kwargs)
        out, _ = run_emulated(monkeypatch, libraries, weights, x, routing, config, coarse=True, **kwargs)
        assert relative_error(out, run_experts(problem_of(weights, **kwargs), weights, x, routing)) < TOLERANCE


@emulated
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]], ids=str)
def test_sums_are_promoted(monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig) -> None:
    """Tensor cores cut off what stands behind 14 bits. Of numbers of one sign 256 columns lose 0.1 %, all 2048 would
    lose 5 %. More stages than a pipeline has."""
    g = torch.Generator().manual_seed(0)
    weights = ExpertWeights.quantize(
        torch.rand(1, 128, 2048, generator=g) / 2048, torch.rand(1, 2048, 64, generator=g) / 64, "mxfp4"
    )
    x, routing = random_call(3, 2048, 1, 1, torch.bfloat16)
    kwargs: Any = {"activations": "fp8_token"}
    out, _ = run_emulated(monkeypatch, libraries, weights, x.abs(), routing, config, 1, coarse=True, **kwargs)
    expected = run_experts(problem_of(weights, top_k=1, **kwargs), weights, x.abs(), routing)
    assert 5e-4 < 1 - out.double().sum() / expected.double().sum() < 3e-3


@emulated
def test_a_token_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch, libraries: Any) -> None:
    """Bitwise, in tiles of every width and on any number of SMs, with sums of 14 bits."""
    weights = random_experts(hidden=320, intermediate=192, experts=2, bias=True)
    x, routing = random_call(30, 320, 2, 2, torch.bfloat16)
    whole, _ = run_emulated(
        monkeypatch, libraries, weights, x, routing, CONFIGS[0], coarse=True, activations="fp8_token"
    )
    expected = run_experts(problem_of(weights, activations="fp8_token"), weights, x, routing)
    assert relative_error(whole, expected) < TOLERANCE
    for config in CONFIGS[1:]:
        part = Routing(*(values[3:20] for values in routing))
        out, _ = run_emulated(
            monkeypatch, libraries, weights, x[3:20], part, config, blocks=1, coarse=True, activations="fp8_token"
        )
        assert torch.equal(out, whole[3:20]), config


@emulated
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]], ids=str)
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    weights = with_input_scales(random_experts(hidden=128, intermediate=64, experts=2))
    for mode in ("fp8_token", "fp8_static"):
        x, routing = random_call(20, 128, 2, 2, torch.bfloat16)
        routing.topk_ids_TA[:] = -1
        out, _ = run_emulated(monkeypatch, libraries, weights, x, routing, config, activations=mode)
        assert not out.any()


@every_config
def test_what_one_call_launches(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """On a CPU, with launches recorded instead of made: names, arguments and shared memory as the kernels want them."""
    made, _ = launches(monkeypatch, "mxfp4", config, sizes=(4160, 320), activations="fp8_token")
    (_, x, *gemms), finalize = made[:-1], made[-1]
    half = len(gemms) // 2
    ups, h, downs = gemms[:half], gemms[half], gemms[half + 1 :]
    assert (x.name, h.name) == ("quantize_row_tiles", "quantize_row_tiles")
    assert (x.grid, x.args["rows"], x.args["top_k"], x.args["tiles"]) == ((10, 1), 10, 3, 0)
    assert (h.grid, h.args["rows"], h.args["top_k"], h.args["x_dtype"]) == ((4, 1), 30, 0, 2)
    assert {up.args["x"] for up in ups} == {x.args["out"]}
    assert {up.args["out"] for up in ups} == {h.args["x"]}
    assert {down.args["x"] for down in downs} == {h.args["out"]}
    assert {down.args["out"] for down in downs} == {finalize.args["y"]}
    assert len(ups) == len(downs) == (2 if config.narrow_m else 1)
    for gemm in (*ups, *downs):
        assert gemm.args["stages"] >= 6
        assert gemm.shared <= SM90.budget.shared_bytes


@pytest.mark.parametrize("part", W4A8_ROWS.parts)
@pytest.mark.parametrize("rows", W4A8_ROWS.tiles)
@pytest.mark.parametrize("format", W4A8_ROWS.formats)
def test_no_register_is_spilled(format: str, rows: int, part: str) -> None:
    pytest.importorskip("triton")
    tools = importlib.import_module("cuda_instructions")
    if not tools.TOOL.exists():
        pytest.skip("this Triton has no disassembler")
    found = tools.disassembled(W4A8_ROWS.unit(format), W4A8_ROWS.kernel(part, rows))
    assert not any(re.match(r"(LDL|STL)", text) for _, text in found)
