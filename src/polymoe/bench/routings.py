"""Routing distributions of benchmarks: uniform, Zipf, or expert ids from a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from polymoe.backends.cost import cost
from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError
from polymoe.machine import Device
from polymoe.problem import Problem
from polymoe.problem.routing import Routing


@dataclass(frozen=True, slots=True, eq=False)
class RoutingDistribution:
    """How tokens are distributed over experts.

    Attributes:
        name: "uniform", "zipf:1" or "file:ids.json", as in records.
        exponent: s of a Zipf law: the expert of rank r is drawn in proportion to ``r**-s``; 0 is uniform.
        ids_NA: rows of expert ids to use instead, in order and cyclically.
    """

    name: str
    exponent: float = 0.0
    ids_NA: Tensor | None = None

    def draw(self, tokens: int, problem: Problem, device: torch.device, *, index: int) -> Routing:
        """Return routing number ``index`` of that many tokens, reproducibly: ids [T, A] int64, weights that sum to 1.

        The experts of a token are distinct, as the top-k of a router are. The popular experts change with the index:
        in a model other layers run between two calls, so that no expert stays in a cache.
        """
        g = torch.Generator(device).manual_seed(1_000_003 * index + tokens)
        if self.ids_NA is not None:
            ids = self.ids_NA[torch.arange(index * tokens, (index + 1) * tokens) % len(self.ids_NA)].to(device)
        else:
            experts = problem.spec.experts
            ranks = torch.randperm(experts, generator=g, device=device) + 1
            # The k largest of log p plus Gumbel noise are a draw without replacement in proportion to p.
            gumbel = (
                torch.rand(tokens, experts, generator=g, device=device).clamp_(1e-30, 1 - 1e-7).log_().neg_().log_()
            )
            ids = (-self.exponent * ranks.log() - gumbel).topk(problem.top_k).indices
        weights = torch.rand(ids.shape, generator=g, device=device) + 0.1
        return Routing(ids, weights / weights.sum(1, keepdim=True))


def parse_routing(text: str, problem: Problem) -> tuple[RoutingDistribution, Problem]:
    """Parse ``--routing``: "uniform", "zipf", "zipf:1.2", or a JSON file, whose A the returned problem gets.

    A file holds one list of expert ids for each token, all of one length: ``[[3, 17], [5, 0]]``.

    Raises:
        ArgumentError: for another word, an unreadable file, or rows that do not fit the problem.
    """
    word, _, number = text.partition(":")
    if text == "uniform":
        return RoutingDistribution(text), problem
    if word == "zipf":
        try:
            exponent = float(number or 1)
        except ValueError:
            exponent = math.nan
        if not 0 < exponent < math.inf:
            raise ArgumentError("routing", expected="zipf:S with a number above 0", got=repr(text))
        return RoutingDistribution(f"zipf:{exponent:g}", exponent), problem
    path = Path(text)
    if not path.is_file():
        raise ArgumentError("routing", expected="uniform, zipf, zipf:S or a JSON file of expert ids", got=repr(text))
    ids = _read_ids(path, problem.spec.experts)
    return RoutingDistribution(f"file:{path.name}", ids_NA=torch.tensor(ids)), replace(problem, top_k=len(ids[0]))


def _read_ids(path: Path, experts: int) -> list[list[int]]:
    expected = f"a JSON list with a list of expert ids, 0 to {experts - 1}, for each token, all of one length"
    try:
        rows = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArgumentError(str(path), expected=expected, got=str(error)) from error
    if not isinstance(rows, list) or not rows:
        raise ArgumentError(str(path), expected=expected, got=f"{type(rows).__name__} without rows")
    for n, row in enumerate(rows):
        good = isinstance(row, list) and row and all(type(i) is int and 0 <= i < experts for i in row)
        if not good or len(row) != len(rows[0]):
            raise ArgumentError(f"{path}, row {n}", expected=expected, got=str(row)[:80])
    return rows


def floor_us(problem: Problem, device: Device, routings: Sequence[Routing]) -> float:
    """The floor averaged over these routings: as :func:`~polymoe.backends.cost.cost`, but with the number of active
    experts counted instead of expected."""
    tokens = routings[0].topk_ids_TA.shape[0]
    least = cost(problem, device, tokens)
    hit = sum(len(r.topk_ids_TA.unique()) for r in routings) / len(routings)
    moved = hit * problem.spec.expert_bytes + least.activation_bytes
    return max(1e6 * moved / device.bandwidth, least.compute_us)
