"""Experts, rows, times and exchange of a rank under wide expert parallelism, simulated: the tables of docs/scale.md.

``python benchmarks/scale.py`` prints that of each model; write_docs.py writes the document's. Nothing here runs on
several GPUs: times of experts are predictions of the cost model, and those of the exchange follow from DeepEP's
published rates.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from backends_document import markdown

from polymoe.backends import BACKENDS
from polymoe.backends.cost import ZIPF_EXPONENT, chances
from polymoe.bench.cases import case_named
from polymoe.machine import Machine

RANKS = (8, 32, 72, 144, 320)
BATCHES = (64, 128, 256)
COPIES = 32
"""Redundant experts: DeepSeek's and LMSYS's number. With more ranks than that gives slots for, each rank has one."""
PREFILL = 16_384
COLUMNS = (
    "ranks", "tokens a GPU", "experts a GPU", "rows an expert", "busiest rank: uniform", "Zipf", "Zipf with copies",
    "experts, us", "exchange, us", "tokens/s a GPU, both in turn", "overlapped",
)  # fmt: skip

DISPATCH_BYTES, COMBINE_BYTES = 1 + 4 / 128, 2
"""Of one number: FP8 with a float32 scale for 128 of them, and BF16."""
LOW_LATENCY = {8: (98, 127), 32: (48, 53), 64: (43, 46), 128: (39, 39), 256: (39, 40)}
NORMAL = {8: (153, 158), 32: (58, 57), 64: (51, 50)}
"""GB/s of dispatch and combine by ranks: docs/legacy.md of DeepEP (0297fc8), H800 with 400 Gb/s InfiniBand. Normal
kernels send each token once to a node, and their rates above 8 ranks are of those bytes; low-latency kernels send each
row by itself."""


@dataclass(frozen=True)
class Model:
    """A model's experts: ``case`` names them on one GPU."""

    name: str
    case: str
    layers: int


MODELS = (Model("DeepSeek-V3, FP8", "deepseek-v3", 58), Model("Kimi-K2, INT4", "kimi-k2", 60))

PUBLISHED = (
    ("LMSYS, H100, prefill", 32, PREFILL, 52_300),
    ("LMSYS, H100, decode", 72, 256, 22_300),
    ("DeepSeek, H800, prefill", 32, PREFILL, 73_700),
    ("DeepSeek, H800, decode", 144, 128, 14_800),
)
"""Deployments of DeepSeek-V3: ranks, tokens a GPU (of decode assumed), and tokens per second of a node of 8 GPUs."""


def slots(experts: int, ranks: int, copies: int) -> int:
    """Return the experts that each rank holds, copies counted."""
    return -(-(experts + copies) // ranks)


def loads(chance: Sequence[float], ranks: int, copies: int) -> list[float]:
    """Return each rank's rows for one token, on average.

    Without copies, experts are placed at random. With them, as EPLB does it: the expert with the most rows in a copy
    gets another, then copies go, the largest first, to the rank with the fewest rows that has room.
    """
    each = slots(len(chance), ranks, copies)
    if not copies:
        order = torch.randperm(len(chance), generator=torch.Generator().manual_seed(0)).tolist()
        found = [0.0] * ranks
        for place, e in enumerate(order):
            found[place % ranks] += chance[e]
        return found
    largest = [(-p, e, 1) for e, p in enumerate(chance)]
    heapq.heapify(largest)
    for _ in range(each * ranks - len(chance)):
        rows, e, count = heapq.heappop(largest)
        heapq.heappush(largest, (rows * count / (count + 1), e, count + 1))
    parts = sorted((-rows for rows, _, count in largest for _ in range(count)), reverse=True)
    room = [(0.0, rank, each) for rank in range(ranks)]
    full = []
    for part in parts:
        rows, rank, left = heapq.heappop(room)
        if left == 1:
            full.append(rows + part)
        else:
            heapq.heappush(room, (rows + part, rank, left - 1))
    return full + [rows for rows, _, _ in room]


def exchange_us(rows: float, hidden: int, ranks: int, rates: dict[int, tuple[int, int]]) -> float:
    """Return the time to send and to get back the rows of one rank, at the rates of the nearest published size."""
    dispatch, combine = rates[min(rates, key=lambda n: abs(n - ranks))]
    return rows * hidden * (DISPATCH_BYTES / dispatch + COMBINE_BYTES / combine) / 1e3


def experts_us(model: Model, experts: int, rows: int) -> float:
    """Return the predicted time of ``rows`` rows on a rank with so many experts, on an H200."""
    problem = case_named(model.case).changed(experts=experts, top_k=1).problem()
    return BACKENDS["cuda"].predict(problem, Machine.of("h200"), rows).time_us


@dataclass(frozen=True)
class Step:
    """A layer's step on the busiest rank; the fields are the table's columns."""

    ranks: int
    tokens: int
    experts: int
    rows: int
    busiest: tuple[float, float, float]
    experts_us: float
    exchange_us: float
    in_turn: float
    overlapped: float

    def cells(self) -> list[str]:
        """Of a row in Markdown."""
        whole = map(str, (self.ranks, self.tokens, self.experts, self.rows))
        times = (str(round(us)) for us in (self.experts_us, self.exchange_us))
        return [*whole, *(f"{m:.2f}" for m in self.busiest), *times, f"{self.in_turn:,.0f}", f"{self.overlapped:,.0f}"]


@functools.cache
def steps(model: Model) -> dict[tuple[int, int], Step]:
    """Of each number of ranks, the decode batches and then a prefill, by ranks and tokens."""
    case, found = case_named(model.case), {}
    skewed = chances(case.experts, case.top_k, ZIPF_EXPONENT)
    even = [case.top_k / case.experts] * case.experts
    for ranks in RANKS:
        kinds = ((even, 0), (skewed, 0), (skewed, COPIES))
        uniform, zipf, balanced = (max(loads(p, ranks, copies)) / (case.top_k / ranks) for p, copies in kinds)
        each = slots(case.experts, ranks, COPIES)
        for batch in (*BATCHES, PREFILL):
            mean = batch * case.top_k
            # Prefill sends a token once to each node of 8 ranks, and at most to 4 of them (node-limited routing).
            sent = mean if batch != PREFILL or ranks == 8 else batch * 4
            rates = NORMAL if batch == PREFILL else LOW_LATENCY
            compute = experts_us(model, each, round(mean * balanced))
            parts = compute, exchange_us(sent, case.hidden, ranks, rates)
            in_turn, overlapped = (1e6 * batch / model.layers / us for us in (sum(parts), max(parts)))
            most = uniform, zipf, balanced
            found[ranks, batch] = Step(ranks, batch, each, round(mean / each), most, *parts, in_turn, overlapped)
    return found


def table(model: Model) -> str:
    """The model's table in Markdown."""
    return markdown(COLUMNS, [step.cells() for step in steps(model).values()])


def deployments() -> str:
    """Published rates beside the simulated ones, in Markdown."""
    rows = []
    for name, ranks, tokens, node in PUBLISHED:
        step = steps(MODELS[0])[ranks, tokens]
        simulated = [f"{rate:,.0f}" for rate in (step.in_turn, step.overlapped)]
        rows.append([f"{name} on {ranks} ranks", f"{round(node / 8, -1):,.0f} ({node:,} a node)", *simulated])
    return markdown(["deployment", "published, tokens/s a GPU", "simulated, in turn", "overlapped"], rows)


if __name__ == "__main__":
    for model in MODELS:
        print(f"### {model.name}\n\n{table(model)}\n")
