"""Times of loading one layer's experts, per part: ``python benchmarks/pack_times.py`` on a GPU.

Prints a line of JSON for each case and source of its experts. ``gpu``: stacked tensors on the GPU, as vLLM hands them
over; ``files``: stacked tensors in files that are in the page cache. Medians of layers after the first, milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymoe.backends import BACKENDS
from polymoe.bench.cases import case_named, random_weights
from polymoe.bench.records import source, utc_now
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.layouts.pack_check import pack_checked
from polymoe.layouts.staging import expert_of
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.scale_range import measure_scales
from polymoe.problem.tensors import ExpertWeights

CASES = ("gpt-oss-120b", "kimi-k2-tp8", "deepseek-v3-tp8")
DEVICE = torch.device("cuda")


def stacked(problem: Problem) -> dict[str, Tensor]:
    """Tensors of all experts on the GPU, [E, ...] by the names of an expert's parts."""
    found: dict[str, Tensor] = {}
    weights = random_weights(problem, DEVICE)
    for e in range(problem.spec.local_experts):
        for name, part in weights.expert(e).parts().items():
            if e == 0:
                found[name] = part.new_empty(problem.spec.local_experts, *part.shape)
            found[name][e] = part
    return found


def in_files(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """The same tensors in files, mapped."""
    found = {}
    for name, tensor in tensors.items():
        flat = tensor.contiguous().view(torch.uint8).flatten().cpu()
        mapped = torch.from_file(str(directory / name), shared=True, size=flat.numel(), dtype=torch.uint8)
        mapped.copy_(flat)
        found[name] = mapped.view(tensor.dtype).view(tensor.shape)
    return found


def timed(call: Callable[[], Any], rounds: int) -> float:
    """Milliseconds until the GPU has done what ``call`` asks for; the median of some times, after one more."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        kept = call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
        del kept
    return round(statistics.median(found[1:]), 2)


def busy(call: Callable[[], Any]) -> float:
    """Milliseconds during which kernels and copies of ``call`` run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kept = call()
        torch.cuda.synchronize()
    del kept
    return round(sum(event.device_time_total for event in profile.key_averages()) / 1e3, 2)


def measure(name: str, problem: Problem, tensors: dict[str, Tensor], where: str, rounds: int) -> dict[str, Any]:
    """The record of one case."""
    spec = problem.spec
    weights = ExpertWeights(spec, lambda e: expert_of(spec, tensors, e), lambda e: expert_of(spec, tensors, e))
    request = PlanRequest(Machine.of(DEVICE.type), "mixed", "auto", BACKENDS, LAYOUTS)
    begin = time.perf_counter()
    first = FusedExperts.pack(problem, weights, request)
    torch.cuda.synchronize()
    with_launches = (time.perf_counter() - begin) * 1e3
    layout, nbytes = LAYOUTS[first.packed.layout], first.packed.nbytes
    del first

    def pack(compare: bool) -> Any:
        return pack_checked(layout, weights, DEVICE, name, compare=compare)

    copy, other = (torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return {
        "case": name,
        "experts": where,
        "layout": layout.name,
        "bytes": nbytes,
        "first_layer_ms": round(with_launches, 1),
        "read_ms": timed(lambda: [weights.peek(e) for e in range(spec.local_experts)], rounds),
        "scales_ms": timed(lambda: measure_scales(weights, DEVICE, name), rounds),
        "pack_ms": timed(lambda: pack(False), rounds),
        "pack_and_compare_ms": timed(lambda: pack(True), rounds),
        "gpu_busy_ms": busy(lambda: pack(True)),
        "layer_ms": timed(lambda: FusedExperts.pack(problem, weights, request, check=False), rounds),
        "copy_ms": timed(lambda: copy.copy_(other), rounds),
    }


def main() -> None:
    """Print the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", default="", help="what was measured, for the record")
    parser.add_argument("--case", action="append", help="a case (default: three)")
    parser.add_argument("--rounds", type=int, default=3, help="times of which the median is printed (default: 3)")
    given = parser.parse_args()
    for name in given.case or CASES:
        problem = case_named(name).problem()
        tensors = stacked(problem)
        about = {
            "label": given.label,
            "rounds": given.rounds,
            "date": utc_now(),
            "gpu": torch.cuda.get_device_name(),
            "version": source(),
        }
        print(json.dumps(measure(name, problem, tensors, "gpu", given.rounds) | about), flush=True)
        with tempfile.TemporaryDirectory() as directory:
            mapped = in_files(tensors, Path(directory))
            del tensors
            torch.cuda.empty_cache()
            print(json.dumps(measure(name, problem, mapped, "files", given.rounds) | about), flush=True)
            del mapped
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
