"""Runs cases given as JSON lines on stdin through the backend ``humming`` on a stand-in for the package, with its own
launches in Triton's interpreter, which needs a process of its own. One JSON line for each: the relative error, or a
traceback."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
import traceback
from dataclasses import replace

import torch

from polymoe.backends.humming import Humming, HummingConfig
from polymoe.backends.reference import run_experts
from polymoe.layouts import LAYOUTS
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.tensors import ExpertWeights
from support import fake_humming
from support.problems import problem_of, random_call, random_experts

fake_humming.install()


def run(case: dict) -> dict:
    weights = random_experts(
        case.get("format", "mxfp4"), hidden=256, intermediate=128, gated=case.get("gated", True), experts=4
    )
    if "rank" in case:
        whole, (first, count) = weights, case["rank"]
        spec = replace(weights.spec, first_expert=first, local_experts=count)
        weights = ExpertWeights(spec, lambda e: whole.expert(first + e))
    problem = problem_of(weights)
    packed = LAYOUTS[case.get("layout", "humming_a16")].pack(weights, torch.device("cpu"))
    fake_humming.NATIVE = case.get("native", packed.layout == "humming_a16_native")
    if case.get("wrong"):  # as a version whose order of weights is another
        packed.tensors["down.codes"].copy_(packed.tensors["down.codes"].roll(64, 1))
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    x, routing = random_call(case.get("tokens", 7), 256, weights.spec.experts, dtype=dtype)
    if case.get("others"):
        routing.topk_ids_TA[0, 0], routing.topk_ids_TA[3, 1] = -1, weights.spec.experts
    if case.get("view"):  # at an address that kernels cannot load from
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    out = torch.full_like(x, float("nan"))
    Humming().bind(problem, packed).run(CallArguments(x, *routing, out), HummingConfig())
    return {"error": relative_error(out, run_experts(problem, weights, x, routing))}


for line in sys.stdin:
    try:
        result = run(json.loads(line))
    except Exception:
        result = {"exception": traceback.format_exc()}
    print(json.dumps(result), flush=True)
