"""A case small enough to measure in milliseconds, a machine, and a way to run the bench on it."""

from __future__ import annotations

from typing import Any

import torch

from polymoe.bench.cases import Case, Workload
from polymoe.bench.measure import Bench
from polymoe.bench.records import Stamp
from polymoe.bench.routings import parse_routing
from polymoe.machine import Machine
from polymoe.problem.activations import SwiGLU

CPU = torch.device("cpu")
TINY = Case(name="tiny", hidden=64, intermediate=48, experts=5, top_k=2, format="mxfp4", activation=SwiGLU(limit=10.0))
STAMP = Stamp(device="cpu", torch="2", triton=None, commit="abc", command="polymoe bench")


def bench(case: Case = TINY, format: str | None = None, activations: Any = None, **kwargs: Any) -> Bench:
    workload = Workload.of_case(case, CPU, format, activations)
    distribution, _ = parse_routing("uniform", workload.problem)
    parts = {
        "workload": workload,
        "distribution": distribution,
        "machine": Machine.of("cpu"),
        "device": CPU,
        "stamp": STAMP,
    }
    return Bench(**{**parts, **kwargs})  # type: ignore[arg-type]
