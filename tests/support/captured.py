"""A captured call of a layer on a GPU, replayed with other rows and another routing, against the reference."""

from __future__ import annotations

import torch

from polymoe.backends.reference import run_experts
from polymoe.layer.experts import FusedExperts
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.tensors import ExpertWeights
from support.problems import random_call


def captured_follows_new_rows(
    experts: FusedExperts, weights: ExpertWeights, tokens: int, most: float = TOLERANCE, replays: int = 1
) -> None:
    """Of a layer on a CUDA device that holds ``weights``, with x in bfloat16."""
    spec, top_k = weights.spec, experts.problem.top_k
    x, routing = random_call(tokens, spec.hidden, spec.experts, top_k, torch.bfloat16)
    x, ids, scores = x.cuda(), routing.topk_ids_TA.cuda(), routing.topk_weights_TA.cuda()
    experts(x, ids, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, ids, scores)
    for seed in range(10, 10 + replays):
        new_x, new = random_call(tokens, spec.hidden, spec.experts, top_k, torch.bfloat16, seed=seed)
        x.copy_(new_x)
        ids.copy_(new.topk_ids_TA)
        scores.copy_(new.topk_weights_TA)
        graph.replay()
        error = relative_error(out.cpu(), run_experts(experts.problem, weights, new_x, new))
        assert error < most, error
