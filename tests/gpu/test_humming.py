"""The backend ``humming`` on a GPU: its layouts against Humming's own packing, and results against the reference.

Needs the package humming-kernels and nvcc; kernels are compiled here, so run it with ``-n 8``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.backends import BACKENDS
from polymoe.backends.humming import HummingConfig
from polymoe.backends.judge import judge
from polymoe.backends.reference import run_experts
from polymoe.formats import FORMATS, Encoding, PerGroup
from polymoe.formats.int4 import Int4
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from polymoe.problem.verdict import Accepted
from support.problems import GPT_OSS, problem_of, random_experts

pytest.importorskip("humming")

GPU = torch.device("cuda")
NAMES = (
    "mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g128", "int4_zero_points", "fp8_block128", "fp8_tensor", "fp8_channel",
)  # fmt: skip


def weights_of(format: str, **kwargs: Any) -> ExpertWeights:
    sizes = {"experts": 5, "hidden": 512, "intermediate": 256, **kwargs}
    if format == "int4_zero_points":
        encoding = Encoding(element="int4", granularity=PerGroup(1, 64), scale_dtype="bfloat16", zero_points=True)
        gate_up, down = random_experts("bf16", **sizes).dequantize()
        return ExpertWeights.quantize(gate_up, down, Int4(encoding), gated=sizes.get("gated", True))
    weights = random_experts(format, **sizes)
    if format != "fp8_channel":
        return weights

    def with_bfloat16_scales(expert: Expert) -> Expert:
        def rounded(q: Any) -> Any:
            return replace(q, scales=q.scales.bfloat16(), encoding=replace(q.encoding, scale_dtype="bfloat16"))

        return replace(expert, **{name: rounded(q) for name, q in expert.projections.items()})

    return ExpertWeights.of([with_bfloat16_scales(expert) for expert in weights])


@pytest.mark.parametrize("format", NAMES)
def test_the_layout_is_what_humming_packs(format: str) -> None:
    from humming.config import LayerConfig  # type: ignore[import-not-found]
    from humming.transform import transform_humming_tensors  # type: ignore[import-not-found]

    from polymoe.backends.humming.runner import layer_fields

    weights = weights_of(format)
    spec, natural = weights.spec, LAYOUTS["natural"].pack(weights, GPU).tensors
    packed = LAYOUTS["humming_a16"].pack(weights, GPU).tensors
    for matrix, names in (("up", ("gate", "up")), ("down", ("down",))):
        encoding, (rows, k) = spec.encodings[matrix], spec.matrix_shape(matrix)
        n = rows * len(names)
        config = LayerConfig(shape_n=n, shape_k=k, num_experts=spec.experts, **layer_fields(encoding))

        def joined(part: str, names: tuple[str, ...] = names) -> Tensor:
            found = [natural[f"{name}.{part}"] for name in names]
            dtype = found[0].dtype
            bytes_ = torch.cat([t.contiguous().view(torch.uint8) for t in found], 1)
            return bytes_.view(dtype)

        tensors = {"weight": joined("codes").contiguous().view(torch.int32)}
        one_scale = format == "fp8_tensor"
        tensors["weight_scale"] = torch.ones(spec.experts, device=GPU) if one_scale else joined("scales")
        if encoding.global_scale:
            tensors["weight_scale_2"] = torch.ones(spec.experts, device=GPU)
        if encoding.zero_points:
            zeros = joined("zero_points").int().unflatten(1, (-1, 8))  # eight rows in a word
            shifts = torch.arange(0, 32, 4, device=GPU, dtype=torch.int32)[:, None]
            tensors["zero_point"] = (zeros << shifts).sum(2, dtype=torch.int32)
        theirs = transform_humming_tensors(config, tensors)
        assert torch.equal(theirs["weight"].view(torch.uint8).flatten(1), packed[f"{matrix}.codes"])
        if not one_scale:
            scales = theirs["weight_scale"].contiguous().view(torch.uint8).flatten(1)
            assert torch.equal(scales, packed[f"{matrix}.scales"])
        if encoding.zero_points:
            zeros = theirs["zero_point"].contiguous().view(torch.uint8).flatten(1)
            assert torch.equal(zeros, packed[f"{matrix}.zero_points"])


def call_of(problem: Problem, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Routing]:
    g = torch.Generator(GPU).manual_seed(tokens)
    x = torch.randn(tokens, problem.spec.hidden, generator=g, device=GPU).to(dtype)
    ids = torch.randint(0, problem.spec.experts, (tokens, problem.top_k), generator=g, device=GPU)
    if tokens > 1:
        ids[0, 0], ids[-1, -1] = -1, problem.spec.experts  # of no expert
    return x, Routing(ids, torch.rand(ids.shape, generator=g, device=GPU))


def bound(problem: Problem, weights: ExpertWeights) -> Any:
    verdict = judge(BACKENDS["humming"], problem, Machine.of("cuda"))
    assert isinstance(verdict, Accepted), verdict
    return BACKENDS["humming"].bind(problem, LAYOUTS["humming_a16"].pack(weights, GPU))


def check(problem: Problem, weights: ExpertWeights, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    runner, (x, routing) = bound(problem, weights), call_of(problem, tokens, dtype)
    on_gpu = ExpertWeights(weights.spec, lambda e: weights.expert(e).to(GPU))
    expected = run_experts(problem, on_gpu, x, routing)
    out = torch.full_like(x, float("nan"))
    runner.run(CallArguments(x, *routing, out), HummingConfig())
    assert relative_error(out, expected) < TOLERANCE
    for _ in range(20):
        again = torch.full_like(x, float("nan"))
        runner.run(CallArguments(x, *routing, again), HummingConfig())
        assert torch.equal(out, again)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("format", NAMES)
def test_results(format: str, tokens: int) -> None:
    weights = weights_of(format)
    check(problem_of(weights), weights, tokens)


@pytest.mark.parametrize("activation", [GPT_OSS, SwiGLU(limit=1.0), GeGLU("tanh"), None])
def test_activations(activation: Any) -> None:
    weights = weights_of("nvfp4", gated=activation is not None)
    check(problem_of(weights, activation), weights, 7)


def test_x_in_float32() -> None:
    weights = weights_of("mxfp4")
    check(problem_of(weights, dtype="fp32"), weights, 7, torch.float32)


def test_a_rank_and_an_expert_map() -> None:
    whole = weights_of("mxfp4", experts=8)
    weights = ExpertWeights(replace(whole.spec, first_expert=2, local_experts=3), lambda e: whole.expert(2 + e))
    problem = problem_of(weights, ep=2)
    check(problem, weights, 33)
    x, routing = call_of(problem, 33)
    at = torch.tensor([-1, -1, 0, 1, 2, -1, -1, -1], device=GPU)
    runner, mapped, plain = bound(problem, weights), torch.empty_like(x), torch.empty_like(x)
    runner.run(CallArguments(x, *routing, plain), HummingConfig())
    runner.run(CallArguments(x, *routing, mapped, expert_map=at), HummingConfig())
    assert torch.equal(mapped, plain)


def test_a_captured_call_and_other_tiles() -> None:
    weights = weights_of("mxfp4")
    problem = problem_of(weights)
    runner, (x, routing) = bound(problem, weights), call_of(problem, 7)
    expected, out = torch.empty_like(x), torch.empty_like(x)
    for rows in (1, 64, 1024):
        config = HummingConfig(rows)
        runner.run(CallArguments(x, *routing, expected), config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner.run(CallArguments(x, *routing, out), config)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)


def test_every_format_is_covered() -> None:
    """Those that the layout holds as FORMATS has them."""
    assert {f for f in FORMATS if not LAYOUTS["humming_a16"].check(weights_of(f).spec)} <= {*NAMES}
