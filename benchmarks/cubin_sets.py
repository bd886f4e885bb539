"""Two builds of the CUDA kernels in one process: the same bits, and times in turn. For changes of their sources.

    python benchmarks/cubin_sets.py OLD_DIR NEW_DIR FILE [--seconds N]     folders of SM90 cubins; appends JSON lines

First times: named layers of at most 32 experts, in the configuration that the backend chooses, old and new in turn.
Then bits: small layers of each format with and without gate, bias and router weights on the input, in every
configuration of their kernels. Ends after so many seconds, with what was left out.
Exit status: 0 if all results are bitwise identical and no time is above 1.03 of the old one in two rounds, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from side_by_side import medians_in_turn

from polymoe.backends.base import Config
from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.bench.cases import CASES, Workload
from polymoe.bench.measure import draw_calls
from polymoe.bench.records import Stamp, check_writable
from polymoe.bench.routings import RoutingDistribution
from polymoe.bench.timing import TimedCalls
from polymoe.common.atomic import append_line
from polymoe.kernels.cuda.targets import SM90, Target
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.verdict import Accepted
from support.cuda_calls import pack
from support.problems import problem_of, random_call, random_experts, with_input_scales

TIMED = (
    ("gpt-oss-20b", "mxfp4", "16bit"), ("gpt-oss-20b", "mxfp4", "fp8_group128"), ("gpt-oss-20b", "mxfp4", "fp8_token"),
    ("deepseek-v3-ep8", "fp8_block128", "fp8_group128"), ("deepseek-v3-ep8", "fp8_channel", "fp8_token"),
    ("kimi-k2-tp8", "int4_g32", "16bit"), ("qwen3-235b", "int4_g128", "16bit"),
    ("qwen3-235b", "int4_g128", "fp8_token"), ("nemotron-3-super", "nvfp4", "16bit"),
    ("qwen3-235b-tp4-bf16", "bf16", "16bit"),
    ("qwen3-235b", "mxfp8", "16bit"),
)  # fmt: skip
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
BITS = (
    *((format, "16bit", 592, 208) for format in ("mxfp4", "nvfp4", "int4_g32", "int4_g128", "mxfp8")),
    *((format, "16bit", 592, 208) for format in ("int4_g32_zp", "int4_g128_zp", "bf16")),
    *(("mxfp4", mode, 576, 192) for mode in ("fp8_group128", "fp8_token", "fp8_static")),
    *((format, mode, 640, 256) for format in ("int4_g128", "int4_g128_zp") for mode in ("fp8_token", "fp8_static")),
    ("fp8_block128", "fp8_group128", 640, 384),
    *((format, mode, 640, 256) for format in ("fp8_channel", "fp8_tensor") for mode in ("fp8_token", "fp8_static")),
)  # fmt: skip
"""Format, mode, H and F. Sizes that no tile divides show its edges."""
ACTIVATIONS = (SwiGLU(alpha=1.702, beta=1.0, limit=7.0), SwiGLU(), GeGLU(), GeGLU("tanh"), ReLU2())


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--timed", type=float, default=math.inf, help="seconds of these for times")
    args = parser.parse_args()
    check_writable(args.file)
    machine = Machine.of("cuda")
    stamp = Stamp.now(machine, " ".join(["python", *sys.argv]))
    targets = [replace(SM90, folder=folder) for folder in (args.old, args.new)]
    good, ratios, equal, began = True, list[float](), 0, time.monotonic()
    for limit, records in ((args.timed, times(machine, targets)), (args.seconds, bits(machine, targets))):
        for record in records:
            append_line(args.file, json.dumps(record | stamp.fields()))
            if "ratio" in record:
                ratios.append(record["ratio"])
                print(*record.values(), flush=True)
                good = good and record["ratio"] <= 1.03
            elif record["same_bits"]:
                equal += 1
            else:
                print("OTHER BITS", *record.values(), flush=True)
                good = False
            if time.monotonic() - began > limit:
                print(f"stopped after {limit} s", flush=True)
                break
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    print(f"{len(ratios)} times: geometric mean {mean:.4f}, worst {max(ratios, default=math.nan):.3f}")
    print(f"{equal} results have the same bits; all as before: {good}")
    return 0 if good else 1


def times(machine: Machine, targets: list[Target]) -> Iterator[dict[str, Any]]:
    """A record for each layer and number of tokens."""
    device = torch.device("cuda")
    for case, format, mode in TIMED:
        shape = CASES[case]
        workload = Workload.of_case(shape.changed(experts=min(32, shape.experts)), device, format, mode)
        problem = workload.problem
        packed = pack(problem, workload.weights, "cuda")
        runners = [CudaRunner(problem, packed, target) for target in targets]
        for tokens in TOKENS:
            config = Cuda().configure(problem, machine, tokens)
            calls = draw_calls(problem, RoutingDistribution("uniform"), device, tokens)
            timed, outs = [], []
            for runner in runners:
                out = [torch.empty_like(x) for x, _ in calls]
                run = [
                    partial(runner.run, CallArguments(x, *r, y), config) for (x, r), y in zip(calls, out, strict=True)
                ]
                timed.append(TimedCalls(run, device, graph=True))
                outs.append(out)
            old, new = medians_in_turn(timed, 4, 8)
            if new / old > 1.03:  # noise, if it does not come again
                old, new = medians_in_turn(timed, 8, 15)
            same = all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
            yield {
                "case": case, "format": format, "mode": mode, "tokens": tokens, "config": str(config),
                "old_us": round(old, 2), "new_us": round(new, 2), "ratio": round(new / old, 4), "same_bits": same,
            }  # fmt: skip
            if not same:
                yield {"case": case, "format": format, "mode": mode, "tokens": tokens, "same_bits": False}


def bits(machine: Machine, targets: list[Target]) -> Iterator[dict[str, Any]]:
    """A record for each small layer and configuration."""
    for format, mode, hidden, intermediate in BITS:
        for activation in ACTIVATIONS:
            for bias, weighted in ((False, False), (True, True)):
                layer = _layer(format, mode, hidden, intermediate, activation, bias, weighted)
                if layer is None:
                    continue
                problem, packed = layer
                runners = [CudaRunner(problem, packed, target) for target in targets]
                for tokens in (1, 5, 60, 600):
                    x, routing = random_call(tokens, hidden, 5, 2, torch.bfloat16)
                    routing.topk_ids_TA[0, 0] = -1
                    call = CallArguments(x.cuda(), *(part.cuda() for part in routing))
                    for config in Cuda().tuning_configs(problem, machine, tokens):
                        yield {
                            "format": format, "mode": mode, "activation": str(activation), "bias": bias,
                            "weights_on_input": weighted, "tokens": tokens, "config": str(config),
                            "same_bits": _same(runners, call, config),
                        }  # fmt: skip


def _layer(
    format: str, mode: str, hidden: int, intermediate: int, activation: Activation, bias: bool, weighted: bool
) -> tuple[Problem, Packed] | None:
    gated = not isinstance(activation, ReLU2)
    weights = random_experts(format, hidden=hidden, intermediate=intermediate, gated=gated, bias=bias)
    if mode == "fp8_static":
        weights = with_input_scales(weights)
    problem = problem_of(weights, activations=mode, activation=activation, weight_on="input" if weighted else "output")
    if not isinstance(Cuda().check(problem, Machine.of("cuda")), Accepted):
        return None
    return problem, pack(problem, weights, "cuda")


def _same(runners: list[CudaRunner], call: CallArguments, config: Config) -> bool:
    outs = []
    for runner in runners:
        for _ in range(3):
            outs.append(torch.full_like(call.x_TH, float("nan")))
            runner.run(call._replace(out=outs[-1]), config)
    return all(torch.equal(out, outs[0]) and bool(out.isfinite().all()) for out in outs)


if __name__ == "__main__":
    sys.exit(main())
