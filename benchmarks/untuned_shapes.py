"""The CUDA backend's heuristic beside what ``tune`` finds, in shapes that are drawn: ten for each format.

    python benchmarks/untuned_shapes.py OUT.jsonl [--formats NAME ...] [--tokens T ...] [--seconds 420] [--count 10]
        [--changed RECORD.jsonl]

For each shape, ``tune`` searches at each token count. Where it finds another configuration than the heuristic's, both
are timed in turn, with uniform and with Zipf 1.0 routing. A line of OUT.jsonl has both configurations and the ratio of
their times, the geometric mean over the two routings; 1 where ``tune`` keeps the heuristic's.

With --changed, only those cells of an earlier OUT.jsonl are measured for which the heuristic has another configuration
now, and all configurations that are nearly as fast as the best are timed in turn; times_us has their times.

Exit status: 1 if the heuristic's takes more than 1.05 times as long anywhere, or if something was not measured, else 0.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from table_gains import ROUTINGS, times_us

from polymoe.backends import BACKENDS
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.bench.cases import CASES, Case, Workload
from polymoe.bench.records import Stamp, source, utc_now
from polymoe.bench.tune import Tune
from polymoe.cli.output import measured_on
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.planning.select import select

SEED = 34
FORMS = {
    "mxfp4": ("mxfp4", None),
    "fp8_block128": ("fp8_block128", None),
    "mxfp4-fp8_token": ("mxfp4", "fp8_token"),
    "int4_g32": ("int4_g32", None),
    "bf16": ("bf16", None),
    "nvfp4": ("nvfp4", None),
}
"""Format of weights and, where it is not the default, of activations."""
LEAST_BYTES, MOST_BYTES = 2e8, 5e9
"""Of the weights of a layer: neither so few that they stay in the L2 cache, nor so many that packing takes long."""
WITHIN = 1.05
NEAR = 1.2
"""With --changed, configurations are timed in turn whose first times are within this factor of the best."""


def drawn(form: str, count: int) -> list[Case]:
    """Return so many cases, the same in each run."""
    format, _ = FORMS[form]
    rng, cases = random.Random(f"{SEED}, {form}"), list[Case]()
    step = 128 if format == "fp8_block128" else 64  # of F: whole blocks of weights
    while len(cases) < count:
        hidden, intermediate = 128 * rng.randint(8, 56), step * rng.randint(256 // step, 3072 // step)
        experts, top_k = rng.choice((8, 16, 32, 48, 64, 96, 128, 160, 256, 384)), rng.choice((1, 2, 3, 4, 6, 8, 10))
        if top_k >= experts or not LEAST_BYTES <= _bytes(format, hidden, intermediate, experts) <= MOST_BYTES:
            continue
        case = CASES["qwen3-235b"].changed(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
        cases.append(replace(case, name=f"H={hidden}, F={intermediate}, E={experts}, A={top_k}", format=format))
    return cases


def _bytes(format: str, hidden: int, intermediate: int, experts: int) -> float:
    """Bytes of the codes of a layer."""
    return 3 * hidden * intermediate * experts * FORMATS[format].encoding.bits / 8


def changed(
    record: Path, todo: list[tuple[str, Case]], machine: Machine, backend: str
) -> dict[tuple[str, str], list[int]]:
    """Return the token counts of each format and case for which the heuristic has another configuration than in the
    record, and print what the record says of them."""
    lines = {
        (n["format"], n["activations"], n["case"], n["tokens"]): n
        for n in map(json.loads, record.open(encoding="utf-8"))
    }
    found = dict[tuple[str, str], list[int]]()
    for form, case in todo:
        problem = case.problem(None, FORMS[form][1])
        for (*key, tokens), line in lines.items():
            if key != [problem.spec.format, str(problem.activations), case.name]:
                continue
            now = str(BACKENDS[backend].configure(problem, machine, tokens))
            if now != line["own"]:
                found.setdefault((form, case.name), []).append(tokens)
                recorded = 1.0 if now == line["best"] else None
                print(f"{form}, {case.name}, {tokens} tokens: {now} for {line['own']}, {line['ratio']:.3f} before, "
                      f"{'not measured' if recorded is None else f'{recorded:.3f}'} now", flush=True)  # fmt: skip
    return found


def in_turn(
    workload: Workload,
    packed: Packed,
    device: torch.device,
    tokens: int,
    backend: str,
    configs: list[Config],
    others: list[Config],
) -> dict[Config, list[float]]:
    """Return times by routing: of the configurations, and of those others that are nearly as fast as the best."""

    def times(some: list[Config], *rounds: int) -> dict[Config, list[float]]:
        found = [times_us(workload, backend, packed, device, r, tokens, some, *rounds) for r in ROUTINGS]
        return dict(zip(some, map(list, zip(*found, strict=True)), strict=True))

    first = {c: math.prod(us) for c, us in times([*configs, *others], 1, 1).items()} if others else {}
    near = [c for c in others if first[c] <= NEAR ** len(ROUTINGS) * min(first.values())]
    return times([*configs, *near])


def measured(
    case: Case,
    form: str,
    tokens: list[int],
    machine: Machine,
    device: torch.device,
    seconds: float,
    backend: str,
    *,
    every: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each token count that ``tune`` finished within ``seconds``.

    Args:
        every: whether to time all configurations in turn that are nearly as fast as the best.
    """
    workload = Workload.of_case(case, device, None, FORMS[form][1])
    problem, own_backend = workload.problem, BACKENDS[backend]
    with tempfile.TemporaryDirectory() as folder:
        tune = Tune(
            workload=workload, machine=machine, device=device, backends=[own_backend], file=Path(folder, "table.jsonl"),
            stamp=Stamp.now(machine, "benchmarks/untuned_shapes.py"), seconds=seconds,
            say=lambda text: print(text, flush=True),
        )  # fmt: skip
        outcomes = list(tune.outcomes(tokens))
    plan = select(problem, machine, backend=backend).plan
    assert plan is not None
    packed = LAYOUTS[plan.layout].pack(workload.weights, device)
    for outcome in outcomes:
        own = own_backend.configure(problem, machine, outcome.tokens)
        if outcome.row is None:
            print(f"{case.name}, {form}, {outcome.tokens} tokens: {outcome.note}", flush=True)
            continue
        best = type(own).from_dict(outcome.row.config, "tune")
        configs = list(dict.fromkeys([own, best]))
        all_configs = own_backend.tuning_configs(problem, machine, outcome.tokens) if every else ()
        others = [config for config in all_configs if config not in configs]
        us = {own: [outcome.row.median_us]}
        if best != own or others:
            us = in_turn(workload, packed, device, outcome.tokens, backend, configs, others)
        ratio = math.prod(o / b for o, b in zip(us[own], us[best], strict=True)) ** (1 / len(us[own]))
        yield {
            "case": case.name, "format": problem.spec.format, "activations": str(problem.activations),
            "tokens": outcome.tokens, "mean_rows": round(cost(problem, machine.device, outcome.tokens).mean_rows, 1),
            "own": str(own), "best": str(best), "own_us": [round(t, 1) for t in us[own]],
            "best_us": [round(t, 1) for t in us[best]], "ratio": round(ratio, 3), "tried": outcome.tried,
            "failed": outcome.failed, "note": outcome.note,
            **({"times_us": {str(c): [round(t, 1) for t in found] for c, found in us.items()}} if every else {}),
        }  # fmt: skip


def main() -> int:
    """Measure shape by shape: the first of every format, then the second ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--formats", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 32, 256, 2048, 8192])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--changed", type=Path, metavar="RECORD.jsonl")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    machine, device = measured_on(options.device)
    end = time.monotonic() + options.seconds
    stamp = {"device": machine.device.name, "torch": torch.__version__, "commit": source(), "date": utc_now()}
    todo = [(form, case) for row in zip(*(drawn(f, options.count) for f in options.formats), strict=True)
            for form, case in zip(options.formats, row, strict=True)]  # fmt: skip
    cells = {(form, case.name): options.tokens for form, case in todo}
    if options.changed:
        cells = changed(options.changed, todo, machine, options.backend)
        todo = [(form, case) for form, case in todo if (form, case.name) in cells]
    lines = list[dict[str, Any]]()
    for i, (form, case) in enumerate(todo):
        began = time.monotonic()
        if began > end:
            break
        seconds = 2 * (end - began) / (len(todo) - i)
        given = machine, device, seconds, options.backend
        for line in measured(case, form, cells[form, case.name], *given, every=bool(options.changed)):
            lines.append({**line, **stamp})
            told = "/".join(map(str, line["own_us"]))
            print(f"{form}, {case.name}: {line['tokens']} tokens, {line['mean_rows']} rows, {told} us, "
                  f"{line['ratio']:.3f}: {line['own']} for {line['best']}", flush=True)  # fmt: skip
            options.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        print(f"{form}, {case.name}: {time.monotonic() - began:.1f} s", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    missing = sum(map(len, cells.values())) - len(lines)
    ratios = [line["ratio"] for line in lines]
    worse = sum(ratio > WITHIN for ratio in ratios)
    print(f"{len(lines)} cells, {missing} not measured; beyond {WITHIN}: {worse}; most {max(ratios, default=1):.3f}, "
          f"median {statistics.median(ratios or [1]):.3f}")  # fmt: skip
    return 1 if worse or missing else 0


if __name__ == "__main__":
    sys.exit(main())
