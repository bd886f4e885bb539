"""Families of CUDA kernels, and calls of them that an emulator makes on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda import spec
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import compare_each_token, run_emulated
from support.cuda_emulator import compile_units
from support.problems import problem_of, random_experts, with_input_scales


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels that compute alike.

    Attributes:
        configs: the configurations that are run.
        more: of the same kernels in other sizes, for slow tests.
        format: of the weights.
        modes: quantizations of x and h.
        hidden, intermediate: sizes with what is not whole: tiles, stages, blocks.
        sizes: others, with experts for each token: the least, many experts for each token, more stages than there are.
        most_tokens: a call has 20 tokens more than a work tile has rows, and at most this many.
        sums: whether tensor cores add E4M3 products coarsely, as Hopper does.
        error: the largest relative error, 0 if it is that of every single token.
    """

    configs: list[CudaConfig]
    more: Sequence[CudaConfig] = ()
    format: str
    modes: Sequence[str]
    hidden: int
    intermediate: int
    sizes: Sequence[tuple[int, int, int]]
    most_tokens: int = 300
    sums: Sequence[bool] = (False,)
    error: float = TOLERANCE

    @property
    def params(self) -> list[Any]:
        """All configurations, as parameters of tests."""
        return [*self.configs, *(pytest.param(config, marks=pytest.mark.slow) for config in self.more)]

    def experts(self, **kwargs: Any) -> ExpertWeights:
        """Random ones, with scales of x and h where these are static."""
        sizes = {"hidden": self.hidden, "intermediate": self.intermediate, "experts": 2}
        weights = random_experts(self.format, **{**sizes, **kwargs})
        return with_input_scales(weights) if any("static" in mode for mode in self.modes) else weights

    def run(self, monkeypatch: pytest.MonkeyPatch, config: CudaConfig, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result of one call."""
        weights, x, routing = args
        return run_emulated(monkeypatch, libraries(config, self.format), weights, x, routing, config, **kwargs)[0]

    def compare(
        self, monkeypatch: pytest.MonkeyPatch, config: CudaConfig, *args: Any, error: float | None = None, **kwargs: Any
    ) -> list[str]:
        """One call with the reference; returns the kernels launched."""
        error = self.error if error is None else error
        (weights, x, routing), units = args, libraries(config, self.format)
        if not error:
            return compare_each_token(monkeypatch, units, weights, x, routing, config, **kwargs)
        out, made = run_emulated(monkeypatch, units, weights, x, routing, config, **kwargs)
        problem = problem_of(weights, **{n: v for n, v in kwargs.items() if n not in ("coarse", "blocks")})
        assert relative_error(out, run_experts(problem, weights, x, routing)) < error
        return made


def libraries(config: CudaConfig, format: str) -> dict[str, ctypes.CDLL]:
    """The units that a call takes."""
    return compile_units(config.kernels.unit(format))


def configs(family: spec.KernelFamily, *rows: int) -> list[CudaConfig]:
    """A family's, with tiles of so many rows, or with all."""
    return [CudaConfig(family.name, block_m) for block_m in rows or family.tiles]


MMA_SIZES = [(16, 16, 1), (192, 176, 22), (1040, 256, 2), (80, 592, 2)]
E4M3_SIZES = [(128, 128, 1), (256, 384, 22), (1152, 128, 2)]
KERNELS = {
    "w4a16": Kernels(
        configs=[
            CudaConfig("w4a16_mma", 8, 64), CudaConfig("w4a16_mma_ordered", 8, 64),
            *configs(spec.W4A16_WGMMA, 32, 256), CudaConfig("w4a16_wgmma", 32, 0, 64),
            CudaConfig("w4a16_wgmma", 128, narrow_m=32),
        ],
        more=[*configs(spec.W4A16_WGMMA, 64, 128), CudaConfig("w4a16_wgmma", 128, narrow_m=64)],
        format="mxfp4", modes=["16bit"], hidden=336, intermediate=272, sizes=MMA_SIZES, most_tokens=60,
    ),
    "w8a16": Kernels(
        configs=[
            CudaConfig("w8a16_mma", 8, 64), CudaConfig("w8a16_wgmma", 32), CudaConfig("w8a16_wgmma", 256),
        ],
        more=[CudaConfig("w8a16_wgmma", 32, 0, 64), CudaConfig("w8a16_wgmma", 128, narrow_m=32)],
        format="mxfp8", modes=["16bit"], hidden=336, intermediate=208, most_tokens=60,
        sizes=[(16, 16, 1), (96, 592, 22), (1040, 160, 2)],
    ),
    "bf16": Kernels(
        configs=configs(spec.BF16, 32, 160), more=configs(spec.BF16, 64, 128), format="bf16", modes=["16bit"],
        hidden=336, intermediate=272,
        sizes=[(16, 16, 1), (192, 176, 22), (1152, 128, 2)],
    ),
    "w4a8": Kernels(
        configs=[*configs(spec.W4A8, 16), CudaConfig("w4a8", 128, narrow_m=32)], more=configs(spec.W4A8, 32, 64, 128),
        format="mxfp4", modes=["fp8_group128"], hidden=192, intermediate=320,
        sizes=[(128, 192, 22), (448, 64, 2), (256, 384, 2)], sums=[False, True], error=5e-3,
    ),
    "w4a8_rows": Kernels(
        configs=[*configs(spec.W4A8_ROWS, 32), CudaConfig("w4a8_rows", 128, narrow_m=32)],
        more=configs(spec.W4A8_ROWS, 64, 128),
        format="mxfp4", modes=["fp8_token", "fp8_static"], hidden=320, intermediate=192, sizes=[(128, 64, 1)], error=0,
    ),
    "w4a8_rows_fast": Kernels(
        configs=configs(spec.W4A8_ROWS_FAST), format="mxfp4", modes=spec.W4A8_ROWS_FAST.activations, hidden=320,
        intermediate=192, sizes=[(128, 64, 1)], error=0,
    ),
    "w8a8": Kernels(
        configs=[*configs(spec.W8A8), *configs(spec.W8A8_SHARED), *configs(spec.W8A8_SHARED_N128)],
        format="fp8_block128", modes=["fp8_group128"], hidden=384, intermediate=256, sizes=E4M3_SIZES,
        sums=[False, True],
    ),
    "w8a8_f16": Kernels(
        configs=configs(spec.W8A8_F16), format="fp8_block128", modes=["fp8_group128"], hidden=384, intermediate=256,
        sizes=E4M3_SIZES, sums=[True], error=0,
    ),
    "w8a8_mma": Kernels(
        configs=[*configs(spec.W8A8_MMA), *configs(spec.W8A8_MMA_ORDERED)],
        format="fp8_block128", modes=["fp8_group128"], hidden=384, intermediate=256,
        sizes=[(128, 128, 1), (256, 384, 22), (2176, 128, 2)], sums=[True], error=0,
    ),
    "w8a8_channel": Kernels(
        configs=[
            c for family in (spec.W8A8_MMA_CHANNEL, spec.W8A8_MMA_ORDERED_CHANNEL, spec.W8A8_F16_CHANNEL)
            for c in configs(family)
        ],
        format="fp8_channel", modes=["fp8_token", "fp8_static"], hidden=384, intermediate=256, sizes=[], sums=[True],
        error=0,
    ),
    "w8a8_channel_coarse": Kernels(
        configs=configs(spec.W8A8_CHANNEL), format="fp8_channel", modes=["fp8_token", "fp8_static"], hidden=384,
        intermediate=256, sizes=[], sums=[True],
    ),
}  # fmt: skip
