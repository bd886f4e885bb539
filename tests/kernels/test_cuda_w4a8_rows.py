"""Kernels for 4-bit weights and rows in E4M3 with one scale per row: run on a CPU from their own sources."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.build import sources, unit_source
from polymoe.kernels.cuda.spec import W4A8_ROWS, W4A8_ROWS_FAST
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.tensors import Expert, ExpertWeights
from support.cuda_calls import compare_each_token, run_emulated
from support.cuda_emulator import compile_files, compile_units, emulated
from support.problems import GPT_OSS, problem_of, random_call, random_experts, with_input_scales

CONFIGS = [*(CudaConfig("w4a8_rows", rows) for rows in W4A8_ROWS.tiles), CudaConfig("w4a8_rows", 128, narrow_m=32)]

every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return compile_units(*(family.unit("mxfp4") for family in (W4A8_ROWS, W4A8_ROWS_FAST)))


@pytest.fixture(scope="module", params=["int4_g128", "int4_g128_zp"])
def int4(request: Any) -> tuple[str, dict[str, ctypes.CDLL]]:
    """A format, and its kernels with two of the tiles, in one width, which are compiled in seconds."""
    unit, files = W4A8_ROWS.unit(request.param), sources()
    tiles = {rows: replace(W4A8_ROWS.tiles[rows], widths=()) for rows in (32, 128)}
    files["instantiations/two_tiles.cu"] = unit_source(replace(W4A8_ROWS, tiles=tiles), request.param)
    library = compile_files(files, "instantiations/two_tiles.cu", ("GemmArgs",), f"{unit}_two_tiles")
    return request.param, {**compile_units(), unit: library}


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
    libraries = compile_units(W4A8_ROWS.unit(format))
    weights = with_input_scales(every_code(format, hidden=320, intermediate=192, experts=2, bias=True))
    x, routing = random_call(config.block_m + 20, 320, 2, 2, torch.bfloat16)
    for mode in ("fp8_token", "fp8_static"):
        kwargs: Any = {"activations": mode, "activation": GPT_OSS}
        compare_each_token(monkeypatch, libraries, weights, x, routing, config, blocks=2, coarse=False, **kwargs)
        out, _ = run_emulated(monkeypatch, libraries, weights, x, routing, config, coarse=True, **kwargs)
        assert relative_error(out, run_experts(problem_of(weights, **kwargs), weights, x, routing)) < TOLERANCE


@emulated
@pytest.mark.parametrize(
    ("config", "least", "most"),
    [(CONFIGS[0], 5e-4, 3e-3), (CONFIGS[-1], 5e-4, 3e-3), (CudaConfig("w4a8_rows_fast", 112), 8e-3, 8e-2)],
    ids=str,
)
def test_sums_are_promoted(
    monkeypatch: pytest.MonkeyPatch, libraries: Any, config: CudaConfig, least: float, most: float
) -> None:
    """Tensor cores cut off what stands behind 14 bits. Of numbers of one sign 256 columns lose 0.1 %, all 2048, as with
    fast accumulation, 5 %. More stages than a pipeline has."""
    g = torch.Generator().manual_seed(0)
    weights = ExpertWeights.quantize(
        torch.rand(1, 128, 2048, generator=g) / 2048, torch.rand(1, 2048, 64, generator=g) / 64, "mxfp4"
    )
    x, routing = random_call(3, 2048, 1, 1, torch.bfloat16)
    kwargs: Any = {"activations": config.kernels.activations[0]}
    out, _ = run_emulated(monkeypatch, libraries, weights, x.abs(), routing, config, 1, coarse=True, **kwargs)
    expected = run_experts(problem_of(weights, top_k=1, **kwargs), weights, x.abs(), routing)
    assert least < 1 - out.double().sum() / expected.double().sum() < most
