"""Backend ``flashinfer`` beside direct calls of the library with the same tactics.

    python benchmarks/direct_calls.py FILE    appends a JSON line for each number of tokens to FILE

DeepSeek-V4-Flash in MXFP4 on an SM90 GPU. FlashInfer's public function takes its tuner's choice, which is replaced by
the backend's. Exit status: 0 if results agree and the backend takes at most 1.03 times as long, 1 if not, 2 for wrong
usage.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import medians_in_turn

from polymoe.backends import BACKENDS
from polymoe.backends.config import Config
from polymoe.bench.cases import CASES, Workload
from polymoe.bench.measure import draw_calls
from polymoe.bench.records import Stamp, check_writable
from polymoe.bench.routings import RoutingDistribution, floor_us
from polymoe.bench.timing import TimedCalls
from polymoe.common.atomic import append_line
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing

CASE = CASES["deepseek-v4-flash"]
TOKENS = (16, 256, 64, 1024, 1)
MOST, LARGEST_DIFFERENCE = 1.03, 5e-3
ROUNDS = 3
"""The two are timed in turn, so often; the median counts."""

Run = Callable[[CallArguments, Config], None]


def flashinfer_pair(workload: Workload, device: torch.device, layout: str) -> tuple[Run, Run]:
    """The backend's call and a direct one, which read the same packed layer."""
    import flashinfer.fused_moe as moe
    from flashinfer.autotuner import AutoTuner

    from polymoe.backends.flashinfer.cutlass_sm90 import _tactics

    problem = workload.problem
    packed = LAYOUTS[layout].pack(workload.weights, device)
    runner, t = BACKENDS["flashinfer"].bind(problem, packed), packed.tensors
    names = _tactics(layout == "flashinfer_sm90_folded")
    limit = torch.full((problem.spec.experts,), problem.activation.limit, device=device)  # type: ignore[attr-defined]
    chosen: dict[str, int] = {}

    def choose(self: Any, op: str, runners: list[Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
        return runners[0], chosen[op.rpartition("::")[2]]

    def direct(call: CallArguments, config: Any) -> None:
        chosen.update(gemm1=names.index(config.up), gemm2=names.index(config.down))
        own, AutoTuner.choose_one = AutoTuner.choose_one, choose
        try:
            moe.cutlass_fused_moe(
                call.x_TH, *call.routing, t["up.codes"], t["down.codes"], torch.bfloat16,
                quant_scales=[t["up.scales"], t["down.scales"]], use_w4_group_scaling=True, swiglu_limit=limit,
                output=call.out_TH,
            )  # fmt: skip
        finally:
            AutoTuner.choose_one = own

    return runner.run, direct


def lines(workload: Workload, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure the backend at every number of tokens."""
    problem, machine, backend = workload.problem, Machine.of("cuda"), BACKENDS["flashinfer"]
    verdict = backend.check(problem, machine)
    layout = (getattr(verdict, "layouts", ()) or backend.layouts)[0]
    pair = flashinfer_pair(workload, device, layout)
    for tokens in TOKENS:
        drawn = draw_calls(problem, RoutingDistribution("uniform"), device, tokens)
        calls = [(x, Routing(routing.topk_ids_TA.int(), routing.topk_weights_TA)) for x, routing in drawn]
        config = backend.configure(problem, machine, tokens)
        outs = [[torch.full_like(x, float("nan")) for x, _ in calls] for _ in pair]
        timed = [
            TimedCalls(
                [
                    partial(run, CallArguments(x, *routing, out), config)
                    for (x, routing), out in zip(calls, to, strict=True)
                ],
                device,
                graph=True,
            )
            for run, to in zip(pair, outs, strict=True)
        ]
        own_us, direct_us = medians_in_turn(timed, ROUNDS, rest_seconds=0.1)
        yield {
            "case": CASE.name, "backend": backend.name, "format": problem.spec.format, "tokens": tokens,
            "config": str(config),
            "backend_us": round(own_us, 2), "direct_us": round(direct_us, 2), "ratio": round(own_us / direct_us, 3),
            "floor_us": round(floor_us(problem, machine.device, [routing for _, routing in calls]), 2),
            "difference": max(relative_error(a, b) for a, b in zip(*outs, strict=True)),
        }  # fmt: skip


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    check_writable(args.file)
    machine, device = Machine.of("cuda"), torch.device("cuda")
    stamp, good = Stamp.now(machine, " ".join(["python", *sys.argv])), True
    workload = Workload.of_case(CASE, device, "mxfp4", "16bit")
    for line in lines(workload, device):
        good = good and line["ratio"] <= MOST and line["difference"] <= LARGEST_DIFFERENCE
        line |= {"version": machine.packages.get("flashinfer-python"), **stamp.fields()}
        append_line(args.file, json.dumps(line))
        print(", ".join(f"{key} {line[key]}" for key in list(line)[1:10]), flush=True)
    print(
        "as predicted" if good else f"NOT as predicted: same results, and at most {MOST} times the direct call's time"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
