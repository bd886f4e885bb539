"""The CUDA kernels as configured for other GPUs, on an H200: the same bits as its own, and how much slower.

    scripts/build-kernels --tests                      first, anywhere: compiles these configurations for SM90
    python benchmarks/cuda_targets.py FILE [--targets NAME,...] [--tokens N,...] [--format FORMAT] [CASE ...]
                                                       appends a JSON line for each time to FILE

The very same calls. Those for few rows run in the configuration that the backend chooses for a GPU that has no others,
and may take 1.25 times as long. Where the H200 runs w4a16_wgmma or w8a16_wgmma, the configurations for SM100 and SM120
run w4a16_mma_tiled or w8a16_mma_tiled, which may take twice as long, and those for other GPUs nothing.
Exit status: 0 if all results are bitwise identical and every time is within these bounds, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.families import layout_on
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.bench.cases import CASES, Workload
from polymoe.bench.measure import draw_calls
from polymoe.bench.records import Stamp, check_writable
from polymoe.bench.routings import RoutingDistribution, floor_us
from polymoe.bench.timing import TimedCalls, Timing
from polymoe.common.atomic import append_line
from polymoe.kernels.cuda.spec import W4A16_MMA, W4A16_MMA_TILED, W8A16_MMA, W8A16_MMA_TILED
from polymoe.kernels.cuda.targets import SM90
from polymoe.layouts import LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.problem.call import CallArguments
from support.cuda_targets import TEST_TARGETS  # type: ignore

DEFAULT = ("deepseek-v4-flash", "nemotron-3-super", "kimi-k2-tp8")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
MOST = {W4A16_MMA.name: 1.25, W8A16_MMA.name: 1.25, W4A16_MMA_TILED.name: 2.0, W8A16_MMA_TILED.name: 2.0}
"""Of the H200's own time, by kernel family."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(TEST_TARGETS))
    parser.add_argument("--tokens", type=lambda text: [int(t) for t in text.split(",")], default=TOKENS)
    parser.add_argument("--format", help="of the weights, instead of the case's own")
    args = parser.parse_intermixed_args()  # options may stand before cases
    unknown = [*(set(args.cases) - set(CASES)), *(set(args.targets) - set(TEST_TARGETS))]
    if unknown:
        parser.error(f"no case or target: {', '.join(unknown)}")
    out, device, targets = args.file, torch.device("cuda"), [SM90, *(TEST_TARGETS[name] for name in args.targets)]
    check_writable(out)
    machine, few = Machine.of("cuda"), Machine(DEVICES["a100"])
    stamp = Stamp.now(machine, " ".join(["python", *sys.argv]))
    print("times in microseconds; in brackets relative to sm90", *args.targets, sep="\n", flush=True)
    good = True
    for name in args.cases or DEFAULT:
        workload = Workload.of_case(CASES[name], device, args.format, "16bit")
        problem = workload.problem
        eight_bits = problem.spec.format in W8A16_MMA.formats
        tiled = W8A16_MMA_TILED if eight_bits else W4A16_MMA_TILED
        layouts = {target.name: layout_on(tiled, target, problem.spec) for target in targets}
        packed = {name: LAYOUTS[name].pack(workload.weights, device) for name in dict.fromkeys(layouts.values())}
        runners = {target.name: CudaRunner(problem, packed[layouts[target.name]], target) for target in targets}
        for tokens in args.tokens:
            own = Cuda().configure(problem, machine, tokens)
            assert isinstance(own, CudaConfig)
            if own.family.endswith("_wgmma"):
                others = CudaConfig(tiled.name, *tiled.tiles)
            else:  # also where the H200 has kernels that add K in order
                own = others = Cuda().configure(problem, few, tokens)
            calls = draw_calls(problem, RoutingDistribution("uniform"), device, tokens)
            floor = floor_us(problem, machine.device, [routing for _, routing in calls])
            times: dict[str, Timing] = {}
            expected = [torch.full_like(x, float("nan")) for x, _ in calls]
            texts = []
            for target in targets:
                config = own if target is SM90 else others
                if config.family not in target.families:
                    continue
                outs = expected if target is SM90 else [torch.full_like(x, float("nan")) for x, _ in calls]
                each = [
                    partial(runners[target.name].run, CallArguments(x, *routing, to), config)
                    for (x, routing), to in zip(calls, outs, strict=True)
                ]
                times[target.name] = t = TimedCalls(each, device, graph=True).time(rest_seconds=0.2)
                same = all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(outs, expected, strict=True))
                ratio = t.median_us / times[SM90.name].median_us
                good = good and same and ratio <= MOST.get(config.family, 1.0)
                texts.append(f"{target.name} {t.median_us:.1f} ({ratio:.2f})" + ("" if same else " OTHER BITS"))
                record = {
                    "case": name, "format": problem.spec.format, "target": target.name, "tokens": tokens,
                    "config": str(config), "median_us": round(t.median_us, 2), "p25_us": round(t.p25_us, 2),
                    "p75_us": round(t.p75_us, 2), "floor_us": round(floor, 2), "ratio": round(ratio, 3),
                    "same_bits": same, **stamp.fields(),
                }  # fmt: skip
                append_line(out, json.dumps(record))
            print(f"{name}, {tokens} tokens, floor {floor:.1f}, {own}: {', '.join(texts)}", flush=True)
    print("as predicted" if good else f"NOT as predicted: same bits, and within these times of sm90's: {MOST}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
