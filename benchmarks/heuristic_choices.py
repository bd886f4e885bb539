"""Configurations on both sides of the thresholds of the CUDA backend's heuristic, timed in turn.

    python benchmarks/heuristic_choices.py [CASE ...]

Each cell is timed hot, in rounds without rest, and rested, after 0.1 s each. The three shapes H3072, H2048 and H6144
are those of benchmarks/peer_times.py that no heuristic was fitted to. About two minutes on an H200.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from peer_times import SHAPES
from side_by_side import medians_in_turn

from polymoe.backends import BACKENDS
from polymoe.backends.cuda.config import CudaConfig
from polymoe.bench.cases import CASES, Case, Workload
from polymoe.bench.measure import draw_calls
from polymoe.bench.routings import RoutingDistribution
from polymoe.bench.timing import TimedCalls
from polymoe.cli.output import measured_on
from polymoe.layouts import LAYOUTS
from polymoe.planning.select import select
from polymoe.problem.call import CallArguments

_ROUTINGS = (RoutingDistribution("uniform"), RoutingDistribution("zipf:1", 1.0))


def shape(name: str, format: str) -> Case:
    """Return an unnamed shape as a case."""
    hidden, intermediate, experts, top_k = next(sizes for sizes in SHAPES if name == f"H{sizes[0]}")
    case = CASES["qwen3-235b"].changed(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
    return replace(case, name=name, format=format)


@dataclass(frozen=True, slots=True)
class Cell:
    """Configurations that are compared in a case at some token counts."""

    case: Case
    tokens: Sequence[int]
    configs: Sequence[CudaConfig]


_FEW = [CudaConfig("w8a8_mma", 8), CudaConfig("w8a8_f16", 32)]
_BLOCK = [CudaConfig("w8a8_f16", 32), CudaConfig("w8a8_f16", 64), CudaConfig("w8a8", 160)]
_CHANNEL = [CudaConfig("w8a8_f16_channel", 32), CudaConfig("w8a8_channel", 160)]
_CHANNEL_FEW = [CudaConfig("w8a8_mma_channel", 8), CudaConfig("w8a8_f16_channel", 32)]
_SHARED = [CudaConfig("w8a8", 160), CudaConfig("w8a8_shared", 128)]
_FEW_W4 = [CudaConfig("w4a16_mma_ordered", 8, 64), CudaConfig("w4a16_mma", 8, 64), CudaConfig("w4a16_wgmma", 32)]
_WGMMA = [CudaConfig("w4a16_wgmma", 128, narrow_m=64), CudaConfig("w4a16_wgmma", 256, narrow_m=64)]
CELLS = (
    Cell(CASES["deepseek-v3-tp8"], (192, 256, 320, 384, 512), [_BLOCK[0], _BLOCK[2]]),
    Cell(shape("H3072", "fp8_block128"), (128, 192, 256, 384, 512), _BLOCK),
    Cell(shape("H2048", "fp8_block128"), (128, 192, 256, 384, 512), _BLOCK),
    Cell(shape("H2048", "fp8_block128"), (2, 4), _FEW),
    Cell(shape("H6144", "fp8_block128"), (256, 384, 512, 640), _BLOCK),
    Cell(shape("H6144", "fp8_block128"), (4, 8), _FEW),
    Cell(shape("H3072", "fp8_channel"), (128, 192, 256, 384), _CHANNEL),
    Cell(shape("H3072", "fp8_channel"), (2, 4), _CHANNEL_FEW),
    Cell(CASES["kimi-k2-tp8"], (6144, 8192), _WGMMA),
    Cell(shape("H3072", "mxfp4"), (1024, 2048, 4096), _WGMMA),
    Cell(shape("H2048", "int4_g32"), (1024, 2048, 4096), _WGMMA),
    Cell(CASES["deepseek-v3-tp8"], (2048, 4096), _SHARED),
    Cell(CASES["deepseek-v3-ep8"], (2048, 4096), _SHARED),
    Cell(CASES["deepseek-v4-flash"], (8, 32, 64, 128), _FEW_W4),
    Cell(CASES["gpt-oss-120b"], (32, 64, 128), _FEW_W4),
    Cell(CASES["kimi-k2-tp8"], (3, 64, 128), _FEW_W4),
)


def main() -> int:
    """Print a line for each case, token count and routing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    only = parser.parse_args().cases
    machine, device = measured_on("auto")
    if machine.device.capability != (9, 0):
        print(f"heuristic_choices: expected an SM90 GPU, got {machine.device.name}", file=sys.stderr)
        return 1
    for cell in [cell for cell in CELLS if not only or cell.case.name in only]:
        workload = Workload.of_case(cell.case, device)
        plan = select(workload.problem, machine, backend="cuda").plan
        assert plan is not None
        run = BACKENDS["cuda"].bind(workload.problem, LAYOUTS[plan.layout].pack(workload.weights, device)).run
        for tokens in cell.tokens:
            for routing in _ROUTINGS:
                calls = draw_calls(workload.problem, routing, device, tokens)
                outs = [torch.empty_like(x) for x, _ in calls]
                given = [CallArguments(x, *choice, out) for (x, choice), out in zip(calls, outs, strict=True)]
                timed = [
                    TimedCalls([partial(run, call, config) for call in given], device, graph=True)
                    for config in cell.configs
                ]
                hot, rested = medians_in_turn(timed, 7, 3), medians_in_turn(timed, 2, 5, rest_seconds=0.1)
                names = [f"{c.family} {c.block_m}" for c in cell.configs]
                told = ", ".join(f"{name}: {us:.1f}" for name, us in zip(names, hot, strict=True))
                what = f"{cell.case.name} {workload.problem.spec.format} {routing.name:8} {tokens:5}"
                print(f"{what} | hot {told} | rested {', '.join(f'{us:.1f}' for us in rested)}", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
