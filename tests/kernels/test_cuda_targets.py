"""The CUDA kernels for other GPUs than the H200: compiled, within each GPU's limits, and emulated with its bits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.bench.cases import CASES
from polymoe.kernels.cuda.build import sources
from polymoe.kernels.cuda.pipelines import STATIC_BYTES
from polymoe.kernels.cuda.spec import W4_FORMATS, W4A16_MMA_TILED
from polymoe.kernels.cuda.targets import SM90, TARGETS, Target, target_for
from polymoe.machine import DEVICES, Machine
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from polymoe.problem.verdict import Accepted
from support.cuda_calls import run_emulated
from support.cuda_emulator import compile_files, compile_units, emulated
from support.cuda_instructions_budget import CVT_COSTS, DISASSEMBLED, MMA_COSTS, TILED_COSTS, instructions
from support.cuda_targets import TEST_TARGETS
from support.problems import GPT_OSS, problem_of, random_call, random_experts

SM120 = TARGETS["sm120"]


@emulated
@pytest.mark.parametrize(
    "format",
    [
        "mxfp4",
        "nvfp4",
        *(pytest.param(format, marks=pytest.mark.slow) for format in W4_FORMATS if format.startswith("int4")),
    ],
)
@pytest.mark.parametrize("intermediate", [208, 592])
def test_x_in_stages_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, format: str, intermediate: int) -> None:
    """More stages than the pipeline has, a last one that is not full, work tiles of every number of rows, in the 99 KB
    that the emulator checks."""
    weights, x, routing = awkward_layer(format, intermediate)
    outs = []
    for target in (SM90, SM120):
        units = compile_units(f"w4a16_mma_{format}", target=target)
        arguments = (units, weights, x, routing, CudaConfig("w4a16_mma", 8, 64))
        activation = {"activation": GPT_OSS} if weights.spec.gated else {}
        out, _ = run_emulated(monkeypatch, *arguments, blocks=2, target=target, **activation)
        outs.append(out)
    assert torch.equal(*outs)
    expected = run_experts(problem_of(weights, **activation), weights, x, routing)
    assert relative_error(outs[0], expected) < TOLERANCE


def awkward_layer(format: str, intermediate: int, hidden: int = 1104) -> tuple[ExpertWeights, torch.Tensor, Routing]:
    """Work tiles of every number of rows, and an expert that is not there."""
    weights = random_experts(
        format, hidden=hidden, intermediate=intermediate, gated=format != "nvfp4", bias=True, experts=3
    )
    x, routing = random_call(17, hidden, 3, 2, torch.bfloat16)
    routing.topk_ids_TA[:8] = 1
    routing.topk_ids_TA[8, 0] = -1
    return weights, x, routing


@pytest.mark.slow
@emulated
@pytest.mark.parametrize(
    ("path", "text", "instead"),
    [
        ("gemm/w4a16_mma.cuh", "                mbarrier_wait(full + 8 * stage, parity);\n", ""),
        ("gemm/w4a16_mma.cuh", "                mbarrier_wait(empty + 8 * stage, parity);\n", ""),
    ],
    ids=["no wait for a full stage", "no wait for an empty stage"],
)
def test_a_missing_wait_shows(monkeypatch: pytest.MonkeyPatch, path: str, text: str, instead: str) -> None:
    files = sources()
    assert text in files[path]
    files[path] = files[path].replace(text, instead)
    weights, x, routing = awkward_layer("mxfp4", 592, hidden=560)
    units, unit = compile_units(target=SM120), "w4a16_mma_mxfp4"
    units[unit] = compile_files(files, SM120.units[unit], ("FewRowsArgs",), "mutant", SM120.defines)
    arguments = (units, weights, x, routing, CudaConfig("w4a16_mma", 8, 64))
    try:
        out, _ = run_emulated(monkeypatch, *arguments, blocks=2, target=SM120, activation=GPT_OSS)
    except AssertionError:  # the emulator has seen it
        return
    expected = run_experts(problem_of(weights, activation=GPT_OSS), weights, x, routing)
    assert not relative_error(out, expected) < TOLERANCE


@emulated
@pytest.mark.parametrize(
    ("format", "gated"),
    [
        ("mxfp4", True),
        ("mxfp4", False),
        pytest.param("nvfp4", False, marks=pytest.mark.slow),
        *(pytest.param(format, True, marks=pytest.mark.slow) for format in W4_FORMATS if format.startswith("int4")),
    ],
)
def test_many_rows_by_mma(monkeypatch: pytest.MonkeyPatch, format: str, gated: bool) -> None:
    """Work tiles of most numbers of rows, one expert with several of them; a k_tail; tiles of the last few rows of
    weights; ids of other ranks."""
    weights = random_experts(format, hidden=336, intermediate=208, gated=gated, bias=True, experts=4)
    x, routing = random_call(105, 336, 4, 2, torch.bfloat16)
    routing.topk_ids_TA[:, 0] = 1
    routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 4, 4])
    routing.topk_weights_TA[0, 0] = float("nan")
    units = compile_units(f"w4a16_mma_tiled_{format}", target=SM120)
    kwargs: dict[str, Any] = {"activation": GPT_OSS, "weight_on": "input"} if gated else {}
    config = CudaConfig("w4a16_mma_tiled", *W4A16_MMA_TILED.tiles)
    out, _ = run_emulated(monkeypatch, units, weights, x, routing, config, target=SM120, **kwargs)
    expected = run_experts(problem_of(weights, **kwargs), weights, x, routing)
    assert relative_error(out, expected) < TOLERANCE


OUTSIDE_LOOPS = {"w4a16_wgmma_gate_up_m32", "w4a16_wgmma_down_m32", "w8a8_gate_up_tiles_m160"}
"""Kernels for SM90 that keep eight bytes on the stack, in some formats: not where they multiply."""


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_registers_and_shared_memory(target: Target) -> None:
    """Nothing spills in loops. Off SM90, all warps have their registers, and static shared memory is within
    what the table sets aside."""
    dump = instructions().dump  # skips where there is no disassembler
    for unit in target.units:
        usage = dump("-res-usage", unit, target)
        found = re.findall(r"Function (\w+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
        assert found
        for name, registers, stack, shared in found:
            assert int(stack) <= (8 if target is SM90 and name in OUTSIDE_LOOPS else 0), name
            if target is not SM90 and unit.startswith(("w4a16_mma", "w8a16_mma")):
                threads = 384 if "_mma_tiled_" in unit else 576
                assert int(registers) <= 65536 // threads // 8 * 8, name
                assert int(shared) <= STATIC_BYTES, name


@pytest.mark.parametrize("target", [TARGETS["sm100"], SM120], ids=lambda t: t.name)
@pytest.mark.parametrize("format", DISASSEMBLED)
def test_instructions_that_eight_weights_cost(target: Target, format: str) -> None:
    """A budget, as for SM90 and less where instructions convert FP4."""
    cost = instructions().mma_costs(format, "gate_up", 8, target)
    assert [*cost] == [8]
    assert cost[8] <= {**MMA_COSTS, **CVT_COSTS}[format]


@pytest.mark.parametrize("format", TILED_COSTS)
def test_instructions_where_many_rows_share_eight_weights(format: str) -> None:
    """An MMA for 8 rows of x and a quarter of a load: each further 16 rows take little more than their MMAs."""
    cost = instructions().tiled_costs(format, "gate_up", 96, SM120)
    assert sorted(cost) == [16, 32, 48, 64, 80, 96]
    for rows, most in cost.items():
        assert most <= TILED_COSTS[format] + (rows - 16) / 16 * 2.6


@pytest.mark.parametrize("device", ["rtx5090", "rtxpro6000", "gb10", "b200", "b300"])
def test_every_case_fits(device: str) -> None:
    """At every number of tokens there is a configuration whose shared memory the GPU has."""
    machine = Machine(DEVICES[device], driver=(13, 0))
    target = target_for(machine.device.capability or (0, 0))
    assert target.budget.shared_bytes <= machine.device.shared_memory_bytes
    accepted = 0
    for case in CASES.values():
        problem = case.problem()
        if not isinstance(Cuda().check(problem, machine), Accepted):
            continue
        accepted += 1
        for tokens in (1, 64, 4096):
            config = Cuda().configure(problem, machine, tokens)
            assert config in Cuda().tuning_configs(problem, machine, tokens)
    assert accepted >= 5


def test_no_kernels_for_other_gpus() -> None:
    with pytest.raises(LookupError, match=r"\(7, 5\)"):
        target_for((7, 5))


def test_configurations_for_an_h200_are_those_of_other_gpus() -> None:
    """Except for the architecture, what a test runs on an H200 is what is shipped."""
    for name in ("sm100", "sm120"):
        test = TEST_TARGETS[f"sm90-as-{name}"]
        assert (test.arch, test.budget, test.defines) == ("90a", TARGETS[name].budget, TARGETS[name].defines)
        assert (test.families, test.units) == (TARGETS[name].families, TARGETS[name].units)
