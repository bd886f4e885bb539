"""Measured times for the GPU at hand, of all named cases: about two minutes on an H200.

    python benchmarks/tune_shipped.py TABLE.jsonl [CASE ...] [--seconds 150] [--again]

Goes on where it was interrupted. A table ships when its file is src/polymoe/planning/tables/GPU.jsonl. Exit status: 0
if every token count of every case has a row, else 1.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from polymoe.backends import BACKENDS
from polymoe.bench.cases import CASES, Workload
from polymoe.bench.compile_ahead import CompileAhead
from polymoe.bench.records import Stamp
from polymoe.bench.tune import Tune
from polymoe.cli.output import measured_on
from polymoe.cli.tune import TOKENS


@dataclass(frozen=True, slots=True)
class Row:
    """What is tuned; ``configs`` is the most that are tried at a token count."""

    case: str
    format: str | None = None
    activations: str | None = None
    backend: str = "cuda"
    configs: int | None = 7


_LARGE = ("deepseek-v3", "kimi-k2")
ROWS = (
    *(Row(case) for case in CASES if case not in _LARGE),
    Row("qwen3-235b-tp4-bf16", backend="triton", configs=2),
    Row("deepseek-v4-flash", "int4_g32"),
    Row("deepseek-v4-flash", "nvfp4"),
    Row("deepseek-v4-flash", "mxfp4", "fp8_group128"),
    Row("deepseek-v4-flash", "mxfp4", "fp8_token"),
    Row("deepseek-v3-tp8", "fp8_channel"),
    *(Row(case) for case in _LARGE),
)

_SHARE = 2.0
"""A row may take so many times its share of the time that is left."""


def main() -> int:
    """Tune row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"case: expected {', '.join(CASES)}, got {unknown[0]!r}")
    rows = [row for row in ROWS if not options.cases or row.case in options.cases]
    machine, device = measured_on(options.device)
    stamp = Stamp.now(machine, shlex.join(["python", "benchmarks/tune_shipped.py", *sys.argv[1:]]))
    end, missing = time.monotonic() + options.seconds, 0
    with CompileAhead(options.jobs, device.index or 0) as compiler:
        for n, row in enumerate(rows):
            began = time.monotonic()
            workload = Workload.of_case(CASES[row.case], device, row.format, row.activations)
            tune = Tune(
                workload=workload, machine=machine, device=device, backends=[BACKENDS[row.backend]], file=options.table,
                stamp=stamp, seconds=min(end - began, _SHARE * (end - began) / (len(rows) - n)), again=options.again,
                configs=row.configs, compiler=compiler, say=lambda text: print(text, flush=True),
            )  # fmt: skip
            for outcome in tune.outcomes(TOKENS):
                missing += outcome.row is None
                what = f"{row.case}, {workload.problem.spec.format}, {row.backend}, {outcome.tokens} tokens"
                if outcome.row is not None:
                    own = "" if outcome.own_us is None else f", heuristic {outcome.own_us:.1f} us"
                    config = ", ".join(f"{k} {v}" for k, v in outcome.row.config.items() if v)
                    what += f": {outcome.row.median_us:.1f} us{own}, {outcome.tried} tried: {config[:90]}"
                print(what, outcome.note, flush=True)
            print(f"{row.case}: {time.monotonic() - began:.1f} s", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
