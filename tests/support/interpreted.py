"""Runs cases given as JSON lines on stdin through the Triton backend in Triton's interpreter, on the CPU.

It needs its own process, because the interpreter is chosen when kernels are defined. For each case it prints one JSON
line: the relative error against the reference (NaN unless every output was written), or a traceback.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
import traceback
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime import interpreter

from polymoe.backends.reference import Reference
from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.formats import Encoding, PerGroup, format_of
from polymoe.layouts import LAYOUTS
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights
from support.problems import GPT_OSS, problem_of, random_call, random_experts

ACTIVATIONS = {"gpt_oss": GPT_OSS, "gelu": GeGLU(), "gelu_tanh": GeGLU("tanh"), "limit": SwiGLU(limit=0.5)}


def patch_once_a_launch() -> None:
    """Triton's interpreter patches its language anew for each call of a function by a kernel: a third of all time. Once
    for each module that functions are in is enough."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: dict[int, Any] = {}

    def patch_lang(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module not in done:
            done[module] = patch(fn)
        return done[module]

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()  # at its end a launch takes its patches back
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


def type_comparisons() -> None:
    """In Triton's interpreter a comparison has the type of what it compares, so that broadcasting it makes integers of
    it. Triton 3.9 refuses those as masks."""
    compute = interpreter.InterpreterBuilder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        found = compute(self, lhs, rhs, op)
        return interpreter.TensorHandle(found.data, triton.language.int1) if found.data.dtype == bool else found

    interpreter.InterpreterBuilder.binary_op = binary_op


def weights_of(case: dict) -> ExpertWeights:
    keys = ("experts", "hidden", "intermediate", "gated", "bias")
    weights = random_experts(case.get("format", "mxfp4"), **{k: case[k] for k in keys if k in case})
    if "scale_dtype" in case:
        encoding = replace(weights.spec.up, scale_dtype=case["scale_dtype"])
        weights = ExpertWeights.quantize(*weights.dequantize(), format_of(encoding))
    if "zero_points" in case:
        encoding = Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype="bfloat16", zero_points=True)
        gate_up, down = weights.dequantize()
        weights = ExpertWeights.quantize(gate_up, down, format_of(encoding))
    if case.get("activations") == "fp8_static":
        plain = weights
        scales = torch.rand(2, plain.spec.local_experts, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.005
        weights = ExpertWeights(
            plain.spec,
            lambda e: replace(plain.expert(e), gate_up_input_scale=scales[0, e], down_input_scale=scales[1, e]),
        )
    if "rank" in case:
        first, count = case["rank"]
        s, whole = weights.spec, weights
        spec = ExpertsSpec(
            hidden=s.hidden,
            intermediate=s.intermediate,
            experts=s.experts,
            gate=s.gate,
            up=s.up,
            down=s.down,
            bias=s.bias,
            first_expert=first,
            local_experts=count,
        )
        weights = ExpertWeights(spec, lambda e: whole.expert(first + e))
    return weights


def run(case: dict) -> dict:
    weights = weights_of(case)
    activation = ACTIVATIONS.get(case.get("activation", ""))
    problem = problem_of(
        weights, activation, weight_on=case.get("weight_on", "output"), activations=case.get("activations", "16bit")
    )
    dtype = getattr(torch, case.get("dtype", "float32"))
    spec = weights.spec
    named = case.get("experts_named", spec.experts)
    x, routing = random_call(case.get("tokens", 7), spec.hidden, named, case.get("top_k", 2), dtype)
    ids = routing.topk_ids_TA.to(getattr(torch, case.get("ids_dtype", "int64")))
    for token, choice, value in case.get("ids", []):
        ids[token, choice] = value
    if "all_to" in case:
        ids[:] = case["all_to"]
    weights_TA = routing.topk_weights_TA.clone()
    weights_TA[(ids < 0) | (ids >= named)] = float("nan")
    routing = Routing(ids, weights_TA)
    tile = Tile(*case.get("tile", (32, 64)), split_k=case.get("split_k", 1))
    down = replace(tile, n_blocks_per_cta=case.get("n_blocks_per_cta", 1))
    config = TritonConfig(case.get("block_m", 16), tile, down, tail_block_m=case.get("tail_block_m", 0))
    packed = LAYOUTS["natural"].pack(weights, torch.device("cpu"))
    runner, options = Triton().bind(problem, packed), {}
    given, out = x, torch.full_like(x, float("nan"))
    if "expert_map" in case:
        options["expert_map"] = torch.tensor(case["expert_map"])
    if case.get("quantized"):
        given, options["x_scales"] = quantized(x, problem.activations)
    assert options.keys() <= runner.options
    expected = torch.empty_like(out)
    Reference().bind(problem, packed).run(CallArguments(given, *routing, expected, **options), config)
    if case.get("workspace", True):
        size = runner.workspace_bytes(*ids.shape, config)  # type: ignore[call-arg]
        memory = torch.full((size + 512,), 255, dtype=torch.uint8)  # NaN, whatever is read before it is written
        options["workspace"] = memory[256 : size + 256]
        runner.run(CallArguments(given, *routing, out, **options), config)
        assert (memory[:256] == 255).all()
        assert (memory[-256:] == 255).all()
    else:
        runner.run(CallArguments(given, *routing, out, **options), config)
    return {"error": relative_error(out, expected)}


def quantized(x: torch.Tensor, activations: ActivationQuantization) -> tuple[torch.Tensor, torch.Tensor]:
    """x in E4M3, and the scale of each row or group, which is larger than it need be."""
    width = activations.group_columns or x.shape[1]
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % width)).view(len(x), -1, width)
    scales = blocks.abs().amax(-1, keepdim=True) / 300
    if activations.scale_dtype == "e8m0":
        scales = scales.log2().ceil().exp2()
    return (blocks / scales).flatten(1)[:, : x.shape[1]].to(torch.float8_e4m3fn), scales.squeeze(2)


patch_once_a_launch()
type_comparisons()
for line in sys.stdin:
    try:
        result = run(json.loads(line))
    except Exception:
        result = {"exception": traceback.format_exc()}
    print(json.dumps(result), flush=True)
