"""Random experts and routings for tests, small and odd in every size."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polymoe.errors import CheckpointError
from polymoe.formats import FORMATS, Format, format_of
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, ReLU2, SwiGLU
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights

GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def random_experts(
    format: str | Format = "mxfp4",
    *,
    experts: int = 5,
    hidden: int = 64,
    intermediate: int = 96,
    gated: bool = True,
    bias: bool = False,
    seed: int = 0,
) -> ExpertWeights:
    """``format``: also a name that ends in ``_zp``, as AWQ and GPTQ store INT4: float16 scales and zero points."""
    if isinstance(format, str) and format.endswith("_zp"):
        plain = FORMATS[format.removesuffix("_zp")].encoding
        format = format_of(replace(plain, scale_dtype="float16", zero_points=True))
    g = torch.Generator().manual_seed(seed)
    rows = 2 * intermediate if gated else intermediate
    return ExpertWeights.quantize(
        torch.randn(experts, rows, hidden, generator=g) / hidden**0.5,
        torch.randn(experts, hidden, intermediate, generator=g) / intermediate**0.5,
        format,
        gated=gated,
        gate_up_bias_EF=torch.randn(experts, rows, generator=g).bfloat16() if bias else None,
        down_bias_EH=torch.randn(experts, hidden, generator=g).bfloat16() if bias else None,
    )


def with_input_scales(weights: ExpertWeights) -> ExpertWeights:
    scales = torch.rand(2, weights.spec.local_experts, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.005
    return ExpertWeights(
        weights.spec,
        lambda e: replace(weights.expert(e), gate_up_input_scale=scales[0, e], down_input_scale=scales[1, e]),
    )


def torn(weights: ExpertWeights, at: int = 2, error: BaseException | None = None) -> ExpertWeights:
    """Weights of which expert ``at`` can be read once, for its scales, and not again, for its codes."""
    seen = set()

    def read(e: int) -> Expert:
        if e == at and e in seen:
            raise error or CheckpointError(f"expert {e}", expected="a shard", got="a shorter one")
        seen.add(e)
        return weights.read(e)

    return ExpertWeights(weights.spec, read, read)


def problem_of(weights: ExpertWeights, activation: Activation | None = None, **kwargs: object) -> Problem:
    activation = activation or (SwiGLU() if weights.spec.gated else ReLU2())
    return Problem(spec=weights.spec, activation=activation, **{"top_k": 2, **kwargs})  # type: ignore[arg-type]


def random_call(
    tokens: int, hidden: int, experts: int, top_k: int = 2, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Routing]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    ids = torch.randint(0, experts, (tokens, top_k), generator=g)
    return x, Routing(ids, torch.rand(tokens, top_k, generator=g))


def plain_experts(weights: ExpertWeights, problem: Problem, x_TH: Tensor, routing: Routing) -> Tensor:
    """The weighted sum in float64, token by token and slot by slot: as plain as it can be written."""
    out = torch.zeros(x_TH.shape[0], weights.spec.hidden, dtype=torch.float64)
    for t in range(x_TH.shape[0]):
        for expert_id, weight in zip(routing.topk_ids_TA[t].tolist(), routing.topk_weights_TA[t].tolist(), strict=True):
            e = expert_id - weights.spec.first_expert
            if not 0 <= e < weights.spec.local_experts:
                continue
            expert = weights.expert(e)
            x = x_TH[t].double() * (weight if problem.weight_on == "input" else 1)

            def project(name: str, v: Tensor, expert=expert) -> Tensor:
                y = expert.projections[name].dequantize(torch.float64) @ v
                bias = getattr(expert, f"{name}_bias")
                return y if bias is None else y + bias.double()

            up = project("up", x)
            h = problem.activation(up) if expert.gate is None else problem.activation(project("gate", x), up)  # type: ignore[call-arg]
            out[t] += project("down", h) * (1 if problem.weight_on == "input" else weight)
    return out
