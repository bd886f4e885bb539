"""Configurations of the CUDA kernels, timed in turn in one process: what a kernel gains that nothing chooses yet.

    python benchmarks/config_times.py [--case CASE] [--activations MODE] --configs FAMILY:BLOCK_M[:NARROW_M] ...
        --tokens T ... [--routing uniform zipf:1.1 ...] [--out FILE.jsonl]

Calls are those of ``polymoe bench kernels``: several in a CUDA graph. Prints, for each routing and token count, the
median time of each configuration in microseconds, and whether results are those of the first to the bit; behind it
the times of gate and up, and of down, by torch's profiler. ``--out`` gets a line for each, with the median of every
round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.cuda.config import CudaConfig
from polymoe.bench.cases import Workload, case_named
from polymoe.bench.contenders import Call
from polymoe.bench.measure import draw_calls
from polymoe.bench.records import source, utc_now
from polymoe.bench.routings import parse_routing
from polymoe.bench.timing import TimedCalls
from polymoe.cli.output import measured_on
from polymoe.layouts import LAYOUTS
from polymoe.planning.select import select
from polymoe.problem.call import CallArguments

PARTS = ("gate_up", "down")


def config_of(text: str) -> CudaConfig:
    """``FAMILY:BLOCK_M`` or ``FAMILY:BLOCK_M:NARROW_M``."""
    family, block_m, *narrow_m = text.split(":")
    return CudaConfig(family, int(block_m), narrow_m=int(narrow_m[0]) if narrow_m else 0)


def parts_us(calls: TimedCalls) -> dict[str, float]:
    """Return the time of each part's grouped GEMMs in one call."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        calls()
        torch.cuda.synchronize()
    found = dict.fromkeys(PARTS, 0.0)
    for event in profiler.key_averages():
        for part in PARTS:
            if f"_{part}_" in event.key:
                found[part] += event.self_device_time_total / len(calls.calls)
    return {part: round(us, 1) for part, us in found.items()}


def main() -> int:
    """Time and print; exit status 1 if results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", default="deepseek-v4-flash")
    parser.add_argument("--activations", default="fp8_group128")
    parser.add_argument("--configs", type=config_of, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--routing", nargs="+", default=["uniform"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds before each measurement")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    configs: Sequence[CudaConfig] = options.configs
    machine, device = measured_on("auto")
    workload = Workload.of_case(case_named(options.case), device, None, options.activations)
    plan = select(workload.problem, machine, backend="cuda").plan
    assert plan is not None
    run = Cuda().bind(workload.problem, LAYOUTS[plan.layout].pack(workload.weights, device)).run
    lines: list[dict[str, Any]] = [
        {"device": machine.device.name, "torch": torch.__version__, "commit": source(), "date": utc_now()}
    ]
    same = True

    def calls_of(config: CudaConfig, calls: Sequence[Call], outs: Sequence[Tensor]) -> TimedCalls:
        given = [CallArguments(x, *routing, out) for (x, routing), out in zip(calls, outs, strict=True)]
        return TimedCalls([partial(run, call, config) for call in given], device, graph=device.type == "cuda")

    print(f"{options.case}, {options.activations}: " + "; ".join(map(str, configs)))
    for name in options.routing:
        routing, problem = parse_routing(name, workload.problem)
        for tokens in options.tokens:
            calls = draw_calls(problem, routing, device, tokens)
            outs = [[torch.full_like(x, float("nan")) for x, _ in calls] for _ in configs]
            timed = [calls_of(config, calls, out) for config, out in zip(configs, outs, strict=True)]
            rounds = [
                [t.time(options.repeats, rest_seconds=options.rest).median_us for t in timed]
                for _ in range(options.rounds)
            ]
            medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
            parts = [parts_us(t) for t in timed] if device.type == "cuda" else [{} for _ in timed]
            for call, out in zip(timed, outs, strict=True):
                for result in out:
                    result.fill_(float("nan"))
                call()
            told = []
            for i, config in enumerate(configs):
                equal = all(torch.equal(a, b) for a, b in zip(outs[i], outs[0], strict=True))
                same &= equal
                told.append(f"{medians[i]:8.1f} ({medians[i] / medians[0]:.3f}{'' if equal else ', OTHER BITS'})")
                lines.append(
                    {
                        "case": options.case, "activations": options.activations, "routing": name, "tokens": tokens,
                        "config": str(config), "median_us": round(medians[i], 1),
                        "rounds_us": [round(times[i], 1) for times in rounds], "same_bits": equal, **parts[i],
                    }
                )  # fmt: skip
            print(f"{name:9} {tokens:6}", *told, *("/".join(map(str, p.values())) for p in parts), flush=True)
            if options.out:
                options.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
