"""Calls at load launch each kernel that any later call launches: no request waits for a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polymoe.backends.config import Config
from polymoe.backends.triton import Triton
from polymoe.engines.serving.warm_up import token_counts, warm_up
from polymoe.layer.packed_layer import PackedLayer
from polymoe.machine import Machine
from polymoe.planning.plan import Plan, PlanStep
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ActivationQuantization
from support.stacked import CPU
from support.triton_launches import Launch, launches, meta_layer


def plan(*bounds: int | None) -> Plan:
    return Plan("natural", tuple(PlanStep(bound, "triton", Config()) for bound in bounds))


def test_bounds_of_each_step_and_powers_of_two() -> None:
    assert token_counts(plan(16, None), 8) == (1, 2, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024)
    assert token_counts(plan(2), 1) == (1, 2)


def test_large_calls_only_where_a_step_begins_with_them() -> None:
    assert token_counts(plan(4096, None), 8)[-2:] == (1024, 4097)


def variant(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a kernel for: constants, dtypes, and what it specializes integers for."""
    kept = {p.name for p in launch.kernel.params if p.do_not_specialize}
    found: list[Any] = [launch.name, sorted(launch.options.items(), key=str)]
    for name, value in launch.values.items():
        if isinstance(value, torch.Tensor):
            found.append((name, value.dtype))
        elif isinstance(value, int) and not isinstance(value, bool) and not _constant(launch, name):
            found.append((name, value > 2**31 - 1, name not in kept and (value == 1, value % 16 == 0)))
        else:
            found.append((name, value))
    return tuple(map(str, found))


def _constant(launch: Launch, name: str) -> bool:
    return next(p.is_constexpr for p in launch.kernel.params if p.name == name)


@pytest.mark.parametrize(
    ("format", "top_k", "activations", "shape"),
    [("mxfp4", 4, "16bit", {}), ("fp8_block128", 8, "16bit", {}), ("fp8_block128", 8, "fp8_group128", {}),
     ("fp8_block128", 2, "fp8_group128", {"hidden": 256, "intermediate": 128}), ("int4_g32", 6, "16bit", {}),
     ("nvfp4", 22, "fp8_token", {})],
)  # fmt: skip
def test_no_later_call_launches_another_kernel(
    format: str, top_k: int, activations: str, shape: dict[str, int]
) -> None:
    quantization = ActivationQuantization.of(activations)
    problem, packed = meta_layer(format, top_k=top_k, bias=False, activations=quantization, **shape)
    machine, backend = Machine.of("a100" if activations == "16bit" else "h100"), Triton()
    chosen = select(problem, machine, role="mixed", backend="triton").require()

    def variants(tokens: int) -> set[tuple[Any, ...]]:
        config: Any = chosen.step(tokens).config
        found = launches(problem, packed, "h100", tokens, config=config, backend=backend)
        return {variant(launch) for launch in found}

    warmed = {v for tokens in token_counts(chosen, top_k) for v in variants(tokens)}
    for tokens in (*range(1, 70), *range(70, 9000, 137), 511, 512, 513, 1023, 1024, 1025, 2048, 4096, 8191, 8192):
        assert variants(tokens) <= warmed, tokens


class Recorder(PackedLayer):
    """A layer that is called as if it were packed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("layer", problem, CPU)
        self.calls: list[tuple[torch.Tensor, ...]] = []

    @property
    def selection(self) -> Any:
        return self._request.select(self.problem)

    def __call__(self, module: nn.Module, *arguments: torch.Tensor) -> Any:
        self.calls.append(arguments)


def test_calls_are_as_an_engine_makes_them() -> None:
    problem, _ = meta_layer("mxfp4")
    layer = Recorder(problem)
    warm_up(layer, nn.Module(), torch.device("cpu"))
    assert not layer.calls  # nothing to compile
    warm_up(layer, nn.Module(), torch.device("meta"))
    counts = token_counts(layer.selection.require(), problem.top_k)
    assert [len(x) for x, _, _ in layer.calls] == list(counts)
    x, ids, weights = layer.calls[-1]
    assert (x.shape, x.dtype) == ((counts[-1], problem.spec.hidden), torch.bfloat16)
    assert (ids.shape, ids.dtype) == ((counts[-1], problem.top_k), torch.int32)
    assert (weights.shape, weights.dtype) == (ids.shape, torch.float32)
