"""A captured call of more expert ids than slots, all of whose experts lie in slots, beside the resident layer.

    python benchmarks/waves.py gpt-oss-120b

Each time is that of one of eight calls in a CUDA graph, whose ids are drawn uniformly from as many experts as there are
slots, so that nothing is copied. Results are compared bitwise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from polymoe.bench.cases import Workload, case_named
from polymoe.bench.slots import packed_layer
from polymoe.bench.timing import TimedCalls
from polymoe.common.shapes import ceil_div
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.machine import Machine

CALLS, REST_S = 8, 0.5
DEVICE = torch.device("cuda")


def timed(layer: FusedExperts, calls: Sequence[tuple[Tensor, ...]]) -> tuple[float, list[Tensor]]:
    """Median time of a call in microseconds, and the results."""
    outs = [torch.empty_like(x) for x, _, _ in calls]
    graph = TimedCalls(
        [lambda c=c, o=o: layer(*c, out=o) for c, o in zip(calls, outs, strict=True)], DEVICE, graph=True
    )
    return min(graph.time(rest_seconds=REST_S).median_us for _ in range(2)), outs


def measure(case: str) -> None:
    resident = packed_layer(Workload.of_case(case_named(case), DEVICE), Machine.of(), DEVICE)
    spec, top_k = resident.problem.spec, resident.problem.top_k
    g = torch.Generator(DEVICE).manual_seed(1)
    for slots in (spec.local_experts // 4, spec.local_experts // 2):
        offloaded = OffloadedExperts(copy.deepcopy(resident), slots)
        for tokens in (8, 16, 64, 256):
            calls = [
                (
                    torch.randn(tokens, spec.hidden, device=DEVICE, generator=g).bfloat16(),
                    torch.rand(tokens, slots, device=DEVICE, generator=g).argsort(1)[:, :top_k] + spec.first_expert,
                    torch.rand(tokens, top_k, device=DEVICE, generator=g),
                )
                for _ in range(CALLS)
            ]
            filling = torch.arange(slots // top_k * top_k, device=DEVICE).view(-1, top_k) + spec.first_expert
            for ids_1A in filling.split(1):
                offloaded(calls[0][0][:1], ids_1A, calls[0][2][:1])
            expected_us, expected = timed(resident, calls)
            got_us, got = timed(offloaded, calls)
            same = all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
            waves = ceil_div(min(spec.local_experts, tokens * top_k), slots)
            print(
                f"{case}, {tokens} tokens, {slots} slots, at most {waves} waves: resident {expected_us:.1f} us, "
                f"offloaded {got_us:.1f} us, same bits {same}",
                flush=True,
            )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        measure(name)
