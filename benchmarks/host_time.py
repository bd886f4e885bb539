"""Host time of a call: from experts(...) to the last launch, without CUDA graphs, by step.

    python benchmarks/host_time.py [--stub] [--json] [--out FILE]

On a GPU of SM90 the launches are real; the queue is emptied between calls, so that none waits for room in it. With
``--stub`` the driver's functions do nothing and tensors are on the CPU: what the Python part costs, anywhere. It runs
with any version of polymoe on PYTHONPATH that has ``FusedExperts.from_weights``, to compare two of them. The CUDA
backend is ``cuda``, or ``hopper`` in versions from before it was called so.

Steps are timed with wrappers around functions, in calls of their own: their sum is somewhat above ``total``.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from polymoe.backends import BACKENDS
from polymoe.bench.records import source, utc_now
from polymoe.common.atomic import append_line
from polymoe.formats import FORMATS
from polymoe.layer.experts import FusedExperts
from polymoe.machine import DEVICES, Machine
from polymoe.problem.activations import SwiGLU
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 1024, 512, 64, 6
CASES = (
    ("mxfp4", "16bit", 1), ("mxfp4", "16bit", 64), ("mxfp4", "16bit", 1024), ("mxfp4", "fp8_group128", 64),
    ("fp8_block128", "fp8_group128", 64), ("fp8_block128", "fp8_group128", 1024), ("bf16", "16bit", 64),
)  # fmt: skip
"""Format, activations and tokens."""

HOOKS = (
    ("argument check", "polymoe.problem.call", "CallArguments.check"),
    ("argument check", "polymoe.layer.runtime", "check_call"),
    ("argument check", "polymoe.layer.experts", "check_call"),
    ("argument check", "polymoe.layer.experts", "FusedExperts._check_call"),
    ("plan lookup", "polymoe.layer.runtime", "LayerRuntime.step"),
    ("plan lookup", "polymoe.layer.runtime", "LayerRuntime.selection"),
    ("plan lookup", "polymoe.planning.plan", "Plan.step"),
    ("plan lookup", "polymoe.calls", "Calls.selection"),
    ("allocation", "torch", "empty"),
    ("allocation", "torch", "empty_like"),
    ("allocation", "torch", "Tensor.new_empty"),
    ("launches", "polymoe.kernels.cuda.driver", "Launch.__call__"),
    ("launches", "polymoe.kernels.cuda.driver", "Kernel.__call__"),
    ("launches", "polymoe.kernels.hopper.driver", "Kernel.__call__"),
)
"""Step, module and function of every version; those that a version lacks are left out."""


def layer(format: str, activations: str, device: str) -> FusedExperts:
    """Experts that are all the same, small: the host does not see sizes."""
    quantizer = FORMATS[format]
    g = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Any:
        return quantizer.quantize(torch.randn(rows, columns, generator=g) / columns**0.5)

    expert = Expert(
        gate=matrix(INTERMEDIATE, HIDDEN), up=matrix(INTERMEDIATE, HIDDEN), down=matrix(HIDDEN, INTERMEDIATE)
    )
    e = expert.up.encoding
    spec = ExpertsSpec(hidden=HIDDEN, intermediate=INTERMEDIATE, experts=EXPERTS, gate=e, up=e, down=e)
    backend = "cuda" if "cuda" in BACKENDS else "hopper"
    return FusedExperts.from_weights(
        ExpertWeights(spec, lambda _: expert),
        SwiGLU(),
        top_k=TOP_K,
        device=device,
        backend=backend,
        activations=activations,
        check=False,  # type: ignore[arg-type]
    )


def stub_driver() -> None:
    """A driver whose functions return 0 at once, and an H200 that is the CPU."""
    nothing = ctypes.CDLL(None).pthread_equal  # compares two addresses: a call through ctypes that does nothing else
    library = SimpleNamespace(**dict.fromkeys(("cuLibraryLoadData", "cuLibraryGetKernel"), lambda *_: 0))
    library.cuKernelSetAttribute, library.cuLaunchKernelEx = lambda *_: 0, nothing
    for name in ("cuda", "hopper"):
        try:
            driver = importlib.import_module(f"polymoe.kernels.{name}.driver")
        except ImportError:
            continue
        driver.ctypes = SimpleNamespace(**{**vars(ctypes), "CDLL": lambda _: library})  # type: ignore[attr-defined]
    machine = Machine(DEVICES["h200"], packages={}, driver=(13, 0))
    Machine.of = classmethod(lambda cls, device=None: machine)  # type: ignore[method-assign, assignment]
    torch.cuda.current_device = lambda: 0
    gpu = SimpleNamespace(multi_processor_count=132, major=9, minor=0, shared_memory_per_block_optin=227 * 1024)
    torch.cuda.get_device_properties = lambda device=None: gpu  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Adds to ``spent``, by step, what the functions of :data:`HOOKS` take; of nested ones only the outermost."""
    inside = []

    def wrapped(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return function(*args, **kwargs)
            inside.append(step)
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent[step] = spent.get(step, 0.0) + (time.perf_counter_ns() - start) / 1e3
                inside.clear()

        return call

    restore = []
    for step, module, path in HOOKS:
        try:
            owner: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            function = getattr(owner, name)
        except (ImportError, AttributeError):
            continue
        if isinstance(owner, type) and name == "__call__" and name not in vars(owner):
            continue  # a class without one has its metaclass's
        inherited = isinstance(owner, type) and name not in vars(owner)
        setattr(owner, name, wrapped(step, function))
        restore.append((owner, name, function, inherited))
    try:
        yield
    finally:
        for owner, name, function, inherited in reversed(restore):
            delattr(owner, name) if inherited else setattr(owner, name, function)


def measure(experts: FusedExperts, tokens: int, calls: int) -> dict[str, float]:
    """Median microseconds of a call, in all and by step."""
    device = experts.device
    x = torch.randn(tokens, HIDDEN).bfloat16().to(device)
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int().to(device)
    weights = torch.rand(tokens, TOP_K).to(device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def median(function: Callable[[], object]) -> float:
        times = []
        for i in range(calls):
            if i % 8 == 0:
                wait()
            start = time.perf_counter_ns()
            function()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return statistics.median(times)

    def call() -> object:
        return experts(x, ids, weights)

    for _ in range(20):
        call()
    total = median(call)
    if device.type == "cpu":  # ids are only checked on a CPU
        total -= median(lambda: (int(ids.min()), int(ids.max())))
    steps: list[dict[str, float]] = []
    spent: dict[str, float] = {}
    with timed(spent):
        for i in range(calls):
            if i % 8 == 0:
                wait()
            spent.clear()
            call()
            steps.append(dict(spent))
    wait()
    found = {step: statistics.median(s.get(step, 0.0) for s in steps) for step in dict.fromkeys(h[0] for h in HOOKS)}
    return {"total": total, **found, "arguments and the rest": max(0.0, total - sum(found.values()))}


def main() -> None:
    """Measure all cases; print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", action="store_true", help="without a GPU: a driver that does nothing")
    parser.add_argument("--calls", type=int, default=400, help="calls for each median")
    parser.add_argument("--json", action="store_true", help="one JSON line a case in place of the table")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    options = parser.parse_args()
    if options.stub:
        stub_driver()
    device = "cpu" if options.stub else "cuda"
    name = "stub" if options.stub else Machine.of("cuda").device.name
    torch.manual_seed(0)
    lines, layers = [], {}
    for format, activations, tokens in CASES:
        key = format, activations
        layers[key] = layers.get(key) or layer(*key, device)
        us = {step: round(t, 2) for step, t in measure(layers[key], tokens, options.calls).items()}
        lines.append(
            {
                "format": format, "activations": activations, "tokens": tokens, "us": us, "device": name,
                "torch": torch.__version__, "commit": source(), "date": utc_now(),
            }
        )  # fmt: skip
    for text in map(json.dumps, lines):
        if options.out:
            append_line(options.out, text)
        if options.json:
            print(text)
    if options.json:
        return
    steps = list(lines[0]["us"])
    print("| case | " + " | ".join(f"{step}, us" for step in steps) + " |")
    print("|---" * (len(steps) + 1) + "|")
    for line in lines:
        cells = " | ".join(f"{line['us'][step]:.1f}" for step in steps)
        print(f"| {line['format']}, {line['activations']}, {line['tokens']} tokens | {cells} |")


if __name__ == "__main__":
    main()
