"""Calls of the Hopper backend: on a GPU, against the reference; anywhere, with launches recorded instead of made."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from polymoe.backends.base import TOLERANCE, layouts_for
from polymoe.backends.hopper import Hopper, HopperConfig
from polymoe.backends.reference import run_experts
from polymoe.experts import relative_error
from polymoe.kernels.hopper import compiled, launch
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.tensors import ExpertWeights
from problems import problem_of, random_call, random_experts

same_experts = cache(random_experts)
"""Quantized once for all configurations."""


def need_sm90() -> None:
    """Skip where there is no such GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an SM90 GPU")


def pack(problem: Problem, weights: ExpertWeights, device: str = "cpu") -> Packed:
    """In the layout that the backend takes for the problem."""
    (layout,) = layouts_for(Hopper(), Hopper().check(problem, Machine.of("h200")))
    return LAYOUTS[layout].pack(weights, torch.device(device))


def on_gpu(
    weights: ExpertWeights, x: torch.Tensor, routing: Routing, config: HopperConfig | None = None, runs: int = 20,
    most: float = TOLERANCE, **kwargs: Any,
) -> None:  # fmt: skip
    """Compare with the reference, and runs with each other to the bit; outputs start as NaN."""
    problem = problem_of(weights, **kwargs)
    expected = run_experts(problem, weights, x, routing)
    packed = pack(problem, weights, "cuda")
    config = config or Hopper().configure(problem, Machine.of("cuda"), x.shape[0])
    x, there = x.cuda(), Routing(*(part.cuda() for part in routing))
    first, unequal = torch.full_like(x, float("nan")), torch.zeros((), dtype=torch.int64, device="cuda")
    Hopper().run(problem, packed, x, there, config, first)
    for _ in range(runs):
        out = torch.full_like(x, float("nan"))
        Hopper().run(problem, packed, x, there, config, out)
        unequal += (out != first).any()
    assert int(unequal) == 0
    assert relative_error(first.cpu(), expected) < most


def names(unit: str) -> set[str]:
    """Kernels of a compiled source file."""
    found = re.findall(rb"\.text\.([a-z0-9_]+)\0", compiled.cubin_path(unit).read_bytes())
    return {name.decode() for name in found}


class Made(NamedTuple):
    """A launch: the kernel, its arguments by name, blocks, threads of each, and bytes of shared memory."""

    name: str
    args: dict[str, Any]
    grid: tuple[int, ...]
    threads: int
    shared: int


def launches(
    monkeypatch: pytest.MonkeyPatch, format: str, config: HopperConfig, gated: bool = True,
    sizes: tuple[int, int] = (336, 272), **kwargs: Any,
) -> tuple[list[Made], dict[str, torch.Tensor]]:  # fmt: skip
    """Of one call with ten tokens in float16, three experts each, on 132 multiprocessors, H and F in ``sizes``; and the
    packed tensors."""
    made: list[Made] = []

    def record(unit: str, name: str) -> Any:
        assert name in names(unit)

        def call(args: Any, grid: Any, threads: int, shared: int = 0) -> None:
            made.append(Made(name, {n: getattr(args, n) for n, _ in args._fields_}, tuple(grid), threads, shared))

        return call

    monkeypatch.setattr(launch, "kernel", record)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    weights = random_experts(format, hidden=sizes[0], intermediate=sizes[1], gated=gated, bias=True)
    problem = problem_of(weights, **kwargs)
    packed = pack(problem, weights)
    x, routing = random_call(10, sizes[0], 5, 3, torch.float16)
    Hopper().run(problem, packed, x, routing, config, torch.empty_like(x))
    return made, dict(packed.tensors)
