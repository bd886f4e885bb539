"""Calls of the CUDA backend: on a GPU, against the reference; anywhere, emulated, or with launches recorded."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.cuda.families import families_for, layout_on
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.launch.args import QuantizeRowsArgs, dtype_number
from polymoe.kernels.cuda.pipelines import e4m3_row_bytes, round_up
from polymoe.kernels.cuda.targets import SM90, Target
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from support.cuda_emulator import Emulator, Recorded
from support.problems import problem_of, random_call, random_experts

TOKEN_TOLERANCE = 5e-3
"""Of the error of every single token, where sums are exact."""

same_experts = cache(random_experts)
"""Quantized once for all configurations."""


def gpu(sms: int, target: Target = SM90) -> SimpleNamespace:
    """What torch says of a GPU of so many SMs that kernels of ``target`` are for."""
    major, minor = target.capabilities[0]
    shared = target.budget.shared_bytes
    return SimpleNamespace(multi_processor_count=sms, major=major, minor=minor, shared_memory_per_block_optin=shared)


def need_sm90() -> None:
    """Skip where there is no such GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an SM90 GPU")


def pack(problem: Problem, weights: ExpertWeights, device: str = "cpu", target: Target = SM90) -> Packed:
    """In the layout that the backend takes for the problem on GPUs of ``target``."""
    families = [family for family in families_for(problem) if family.name in target.families]
    (layout,) = {layout_on(family, target, problem.spec) for family in families}
    return LAYOUTS[layout].pack(weights, torch.device(device))


def awkward_call(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Routing]:
    """Three of seven experts a token, one of them an eighth that is not there; a row with a group of zeros."""
    x, routing = random_call(tokens, hidden, 7, 3, dtype)
    routing.topk_ids_TA[0, 0] = 7
    routing.topk_weights_TA[0, 0] = float("nan")
    x[-1, :128] = 0
    return x, routing


def repeated_on_gpu(
    weights: ExpertWeights,
    x: torch.Tensor,
    routing: Routing,
    config: CudaConfig | None = None,
    runs: int = 20,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, with which all runs agree bitwise, and the reference's; outputs start as NaN."""
    problem = problem_of(weights, **kwargs)
    expected = run_experts(problem, weights, x, routing)
    packed = pack(problem, weights, "cuda")
    config = config or Cuda().configure(problem, Machine.of("cuda"), x.shape[0])
    x, there = x.cuda(), Routing(*(part.cuda() for part in routing))
    first, unequal = torch.full_like(x, float("nan")), torch.zeros((), dtype=torch.int64, device="cuda")
    Cuda().bind(problem, packed).run(CallArguments(x, *there, first), config)
    for _ in range(runs):
        out = torch.full_like(x, float("nan"))
        Cuda().bind(problem, packed).run(CallArguments(x, *there, out), config)
        unequal += (out != first).any()
    assert int(unequal) == 0
    return first.cpu(), expected


def on_gpu(*args: Any, most: float = TOLERANCE, **kwargs: Any) -> None:
    """Compare what :func:`repeated_on_gpu` gives."""
    assert relative_error(*repeated_on_gpu(*args, **kwargs)) < most


def same_in_any_batch(weights: ExpertWeights, hidden: int, **kwargs: Any) -> None:
    """A token's result, bitwise, alone and among others, in every configuration that may be asked for."""
    problem = problem_of(weights, batch_invariant=True, **kwargs)
    packed = pack(problem, weights, "cuda")
    x, routing = random_call(600, hidden, weights.spec.experts, dtype=torch.bfloat16)
    x, routing = x.cuda(), Routing(*(part.cuda() for part in routing))
    whole = torch.empty_like(x)
    configs = Cuda().tuning_configs(problem, Machine.of("h200"), 1)
    assert configs
    Cuda().bind(problem, packed).run(CallArguments(x, *routing, whole), configs[-1])
    for config in configs:
        for some in (slice(0, 1), slice(599, 600), slice(31, 70), slice(3, 600)):
            out = torch.empty_like(x[some])
            Cuda().bind(problem, packed).run(
                CallArguments(x[some], *Routing(*(values[some] for values in routing)), out), config
            )
            assert torch.equal(out, whole[some]), (config, some)


def same_in_both(
    weights: ExpertWeights,
    x: torch.Tensor,
    routing: Routing,
    one: CudaConfig,
    other: CudaConfig,
    activations: str,
    **kwargs: Any,
) -> None:
    """Both configurations' results on a GPU, bitwise."""
    problem = problem_of(weights, activations=activations, **kwargs)
    packed, x = pack(problem, weights, "cuda"), x.cuda()
    results = [torch.full_like(x, float("nan")) for _ in range(2)]
    for config, out in zip((one, other), results, strict=True):
        Cuda().bind(problem, packed).run(CallArguments(x, *Routing(*(part.cuda() for part in routing)), out), config)
    assert torch.equal(*results), ((results[0] != results[1]).sum(), results[0].numel())


def run_emulated(
    monkeypatch: pytest.MonkeyPatch,
    libraries: dict[str, ctypes.CDLL],
    weights: ExpertWeights,
    x: torch.Tensor,
    routing: Routing,
    config: CudaConfig,
    blocks: int = 3,
    coarse: bool = False,
    options: dict[str, torch.Tensor] | None = None,
    target: Target = SM90,
    aligned: bool = False,
    out_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, list[str]]:
    """The result on a GPU of ``blocks`` SMs, emulated, and the kernels launched. ``libraries`` are compiled for
    ``target``. The result has the dtype of x, unless ``out_dtype`` is given."""
    problem = problem_of(weights, **kwargs)
    packed = pack(problem, weights, target=target)
    emulator = Emulator(libraries, list(packed.tensors.values()), coarse=coarse, aligned=aligned)
    monkeypatch.setattr(modules, "kernel", emulator)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(blocks))
    out = torch.full(x.shape, float("nan"), dtype=out_dtype or x.dtype)
    runner = CudaRunner(problem, packed, target)
    # Where no kernel writes, every number is NaN.
    bytes = runner.workspace_bytes(len(x), routing.topk_ids_TA.shape[1], config)
    runner.run(
        CallArguments(x, *routing, out, workspace=torch.full((bytes,), 0xFF, dtype=torch.uint8), **options or {}),
        config,
    )
    return out, emulator.made


def compare_each_token(
    monkeypatch: pytest.MonkeyPatch,
    libraries: dict[str, ctypes.CDLL],
    weights: ExpertWeights,
    x: torch.Tensor,
    routing: Routing,
    config: CudaConfig,
    blocks: int = 3,
    coarse: bool = True,
    **kwargs: Any,
) -> list[str]:
    """Every single token, emulated, with the reference; returns the kernels launched.

    y and the result are rounded to bfloat16 on the way, 2e-3, and h must be rounded as the reference does, which sums
    of 14 bits do not allow: 9 % of tokens were beyond 6e-3 with them.
    """
    out, made = run_emulated(monkeypatch, libraries, weights, x, routing, config, blocks, coarse, **kwargs)
    expected = run_experts(problem_of(weights, **kwargs), weights, x, routing)
    errors, sizes = (out.float() - expected).norm(dim=1), expected.norm(dim=1)
    assert bool((errors <= TOKEN_TOLERANCE * sizes).all()), (errors / sizes).max()
    return made


@cache
def names(unit: str, target: Target = SM90) -> set[str]:
    """Kernels of a compiled source file."""
    found = re.findall(rb"\.text\.([a-z0-9_]+)\0", modules.read_cubin(unit, target))
    return {name.decode() for name in found}


class Made(NamedTuple):
    """A launch: the kernel, its arguments by name, blocks, threads of each, and bytes of shared memory."""

    name: str
    args: dict[str, Any]
    grid: tuple[int, ...]
    threads: int
    shared: int


def launches(
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    config: CudaConfig,
    gated: bool = True,
    sizes: tuple[int, int] = (336, 272),
    **kwargs: Any,
) -> tuple[list[Made], dict[str, torch.Tensor]]:
    """Of one call with ten tokens in float16, three experts each, on 132 SMs, H and F in ``sizes``; and the
    packed tensors."""
    made: list[Made] = []

    def record(unit: str, name: str, target: Target) -> Any:
        assert name in names(unit, target)

        def call(args: Any, grid: Any, threads: int, shared: int = 0) -> None:
            fields = (n for kind in type(args).__mro__ for n, _ in getattr(kind, "_fields_", ()))
            made.append(Made(name, {n: getattr(args, n) for n in fields}, tuple(grid), threads, shared))

        return Recorded(call)

    monkeypatch.setattr(modules, "kernel", record)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(132))
    weights = random_experts(format, hidden=sizes[0], intermediate=sizes[1], gated=gated, bias=True)
    problem = problem_of(weights, **kwargs)
    packed = pack(problem, weights)
    x, routing = random_call(10, sizes[0], 5, 3, torch.float16)
    Cuda().bind(problem, packed).run(CallArguments(x, *routing, torch.empty_like(x)), config)
    return made, dict(packed.tensors)


def quantized_rows(kernel: str, x_TH: torch.Tensor) -> torch.Tensor:
    """Rows of x in E4M3 with their scales, uint8 [T, bytes], by ``modules.kernel``."""
    tokens, columns = x_TH.shape
    out = torch.empty(tokens, e4m3_row_bytes(columns), dtype=torch.uint8)
    threads = min(512, round_up(columns // 16, 32))
    args = QuantizeRowsArgs(x_TH.data_ptr(), out.data_ptr(), columns, dtype_number(x_TH.dtype))
    launch = modules.kernel("quantize", kernel, SM90).prepare(args, threads)
    launch.set_grid(tokens, -(-columns // (16 * threads)))
    launch(0)
    return out
