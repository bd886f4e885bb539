"""Packed layers of serving engines on a GPU: after the load, no call waits for a compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import nn

from polymoe.checkpoint import Checkpoint
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerPlan, judge_layer
from polymoe.engines.serving.warm_up import warm_up
from polymoe.layer.packed_layer import PackedLayer
from polymoe.machine import Machine
from support.stacked import BUNDLED, CPU, MODELS, experts_of, facts_of


@pytest.mark.parametrize("model", ["sums-mixtral-awq", "sums-qwen3-fp8", "sums-gpt-oss-mxfp4", "sums-nemotron-h-nvfp4"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_no_call_compiles_after_the_load(model: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, request = torch.device("cuda"), replace(CPU, machine=Machine.of("cuda"), backend=backend)
    theirs = Checkpoint.open(MODELS / model).problem(BUNDLED[model].layer)
    facts = facts_of(model, activation=theirs.activation, weight_on=theirs.weight_on, top_k=theirs.top_k)
    plan = judge_layer(facts, request, EngineSettings())
    assert isinstance(plan, LayerPlan)
    experts = experts_of(model, (0, 1), (0, 1))
    on_gpu = replace(experts, tensors={name: tensor.to(device) for name, tensor in experts.tensors.items()})
    layer, module = PackedLayer("layer", plan.problem, request), nn.Module()
    layer.pack(module, on_gpu.weights(plan.problem.spec), device)
    warm_up(layer, module, device)

    compiled: list[str] = []
    compile_kernel = triton.JITFunction._do_compile

    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(self.fn.__name__)
        return compile_kernel(self, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "_do_compile", note)
    spec = plan.problem.spec
    for tokens in (*range(1, 40), 63, 64, 65, 100, 128, 129, 257, 511, 1000, 1024, 2049, 5000):
        x_TH = torch.randn(tokens, spec.hidden, dtype=torch.bfloat16, device=device)
        ids_TA = torch.rand(tokens, spec.experts, device=device).topk(plan.problem.top_k).indices.int()
        layer(module, x_TH, ids_TA, torch.rand(ids_TA.shape, device=device))
    assert not compiled
