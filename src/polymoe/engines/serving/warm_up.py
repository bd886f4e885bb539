"""First launches of a layer's kernels when the model is loaded: compiling one takes seconds, too long for a request.

Engines run some batches before they serve, but not every number of tokens that a plan, or a kernel, distinguishes.
"""

from __future__ import annotations

import torch
from torch import nn

from polymoe.layer.packed_layer import PackedLayer
from polymoe.planning.plan import Plan
from polymoe.problem.call import TORCH_DTYPES

_MOST_ROWS = 8192
"""Rows (tokens times active experts) beyond which kernels are no others."""


def token_counts(plan: Plan, top_k: int) -> tuple[int, ...]:
    """Return numbers of tokens for which calls launch every kernel that the plan needs, ascending.

    These are the bounds of each step, and powers of two between them, as kernels differ by the order of magnitude.
    """
    found, first = set(), 1
    for step in plan.steps:
        last = step.max_tokens or _MOST_ROWS
        powers = {1 << n for n in range(last.bit_length()) if first < 1 << n < last}
        found |= {first} | {tokens for tokens in powers | {last} if tokens * top_k <= _MOST_ROWS}
        first = last + 1
    return tuple(sorted(found))


def warm_up(layer: PackedLayer, module: nn.Module, device: torch.device) -> None:
    """Call a layer, whose parameters ``module`` has on ``device``, once for each of :func:`token_counts`, as an engine
    does; on a CPU nothing is compiled."""
    if device.type == "cpu":
        return
    problem = layer.problem
    spec, dtype = problem.spec, TORCH_DTYPES[problem.dtype]
    for tokens in token_counts(layer.selection.require(layer.where), problem.top_k):
        x_TH = torch.zeros(tokens, spec.hidden, dtype=dtype, device=device)
        places = torch.arange(tokens * problem.top_k, dtype=torch.int32, device=device) % spec.local_experts
        ids_TA = (places + spec.first_expert).view(tokens, problem.top_k)
        layer(module, x_TH, ids_TA, torch.ones(ids_TA.shape, dtype=torch.float32, device=device))
