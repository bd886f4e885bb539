"""A packed layer's state: updated from itself, loaded under inference mode, copied, compiled, exported, shared."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.errors import PlanError
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.problem.activations import SwiGLU
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from support.problems import plain_experts, problem_of, random_call, random_experts, torn, with_input_scales
from support.toys import Toy

Call = tuple[Tensor, Tensor, Tensor]
PERMUTED = [3, 1, 0, 4, 2]


@pytest.fixture
def call() -> Call:
    x, routing = random_call(6, 64, 5)
    return x, *routing


def layer(weights: ExpertWeights | None = None, **kwargs: Any) -> FusedExperts:
    return FusedExperts.from_weights(weights or random_experts(), SwiGLU(), top_k=2, device="cpu", **kwargs)


def expected(weights: ExpertWeights, call: Call) -> Tensor:
    return plain_experts(weights, problem_of(weights), call[0], Routing(*call[1:]))


def permuted(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(weights.spec, lambda e: weights.expert(PERMUTED[e]))


def in_layout(weights: ExpertWeights, layout: str) -> FusedExperts:
    """Packed in a layout of a GPU's kernels, and run by a toy."""
    request = PlanRequest(Machine.of("cpu"), "mixed", "toy", {"toy": Toy("toy", layouts=(layout,))}, LAYOUTS)
    return FusedExperts.pack(problem_of(weights), weights, request, check=False)


class TestUpdateFromItself:
    """The new experts are read from the tensors that they are to replace."""

    @pytest.mark.parametrize("name", ["natural", "dequantized", "w4a16_fragments"])
    def test_every_way_to_read_them(self, name: str) -> None:
        """Views, tensors computed from the packed ones, experts read before, a mixture, another module's, and experts
        that another thread reads."""
        weights = random_experts(hidden=64, intermediate=128)
        new = random_experts(hidden=64, intermediate=128, seed=5)

        def rearranged(own: FusedExperts) -> list[ExpertWeights]:
            spec, packed = own.weights.spec, own.packed
            before = [own.weights.expert(e) for e in PERMUTED]
            twin = copy.copy(own).weights
            return [
                permuted(own.weights),
                ExpertWeights(spec, before.__getitem__),
                ExpertWeights(spec, lambda e: LAYOUTS[name].unpack(packed).expert(PERMUTED[e])),
                ExpertWeights(spec, lambda e: new.expert(e) if e < 3 else own.weights.expert(PERMUTED[e])),
                permuted(twin),
                ExpertWeights(spec, lambda e: ahead.submit(own.weights.expert, PERMUTED[e]).result()),
            ]

        ahead = ThreadPoolExecutor(1)
        for at in range(6):
            own = in_layout(weights, name)
            source = rearranged(own)[at]
            wanted = [{n: part.clone() for n, part in source.expert(e).parts().items()} for e in range(5)]
            own.update(source, check=name == "natural" and at % 2 == 0)
            for e in range(5):
                found = own.weights.expert(e).parts()
                assert all(torch.equal(found[n].view(torch.uint8), p.view(torch.uint8)) for n, p in wanted[e].items())

    def test_an_expert_that_cannot_be_read_changes_nothing(self, call: Call) -> None:
        experts = layer()
        y = experts(*call)
        with pytest.raises(Exception, match="expert 2"):
            experts.update(torn(permuted(experts.weights)))
        assert torch.equal(experts(*call), y)


def with_parameters(weights: ExpertWeights) -> ExpertWeights:
    """As of a module that is trained: whatever may require a gradient does."""

    def learnt(part: Tensor) -> Tensor:
        return torch.nn.Parameter(part) if part.dtype.is_floating_point and part.itemsize > 1 else part

    experts = [weights.expert(e).map(learnt) for e in range(weights.spec.local_experts)]
    return ExpertWeights(weights.spec, experts.__getitem__)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("format", ["bf16", "mxfp4", "fp8_block128"])
def test_sources_that_require_gradients_are_not_kept(format: str, backend: str, call: Call) -> None:
    weights = random_experts(format, bias=True)
    experts = layer(with_parameters(weights), backend=backend)
    experts.update(with_parameters(random_experts(format, bias=True, seed=5)))
    assert not any(b.requires_grad or b.grad_fn for b in experts.buffers())
    assert not experts(*call).requires_grad
    assert torch.equal(copy.deepcopy(experts)(*call), experts(*call))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_no_layout_makes_tensors_that_gradients_or_inference_mode_hold(name: str) -> None:
    format = {"flashinfer_trtllm_int4": "int4_g32", "w8_swizzle128": "fp8_block128", "w8a16_fragments": "mxfp8",
              "w16_swizzle128": "bf16"}.get(name, "nvfp4" if "nvfp4" in name else "mxfp4")  # fmt: skip
    weights = with_parameters(random_experts(format, hidden=256, intermediate=256))
    if LAYOUTS[name].check(weights.spec):
        pytest.skip("the layout holds other experts")
    with torch.inference_mode():
        packed = LAYOUTS[name].pack(weights, torch.device("cpu"))
    assert not any(t.is_inference() or t.requires_grad for t in packed.tensors.values())


def compiled(experts: FusedExperts, backend: str = "eager") -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda *a, **k: experts(*a, **k), backend=backend, fullgraph=True)


def test_a_failed_update_is_known_to_all_who_share_the_tensors(call: Call) -> None:
    experts = layer()
    run = compiled(experts)
    y = run(*call)
    twin = copy.copy(experts)
    twin(*call)
    for update in (experts.update, twin.update):
        with pytest.raises(Exception, match="expert 2"):
            update(torn(random_experts(seed=5)))
        for use in (experts, twin, run, copy.copy(twin)):
            with pytest.raises(PlanError, match="got a mixture"):
                use(*call)
        update(random_experts())
        for use in (experts, twin, run):
            assert torch.equal(use(*call), y)


def with_bias_dtype(weights: ExpertWeights, dtype: torch.dtype, only: int | None = None) -> ExpertWeights:
    def read(e: int) -> Expert:
        expert = weights.expert(e)
        if only not in (None, e):
            return expert
        return replace(expert, **{n: v.to(dtype) for n, v in expert.vectors.items() if n.endswith("_bias")})

    return ExpertWeights(weights.spec, read)


def test_biases_of_another_dtype_are_refused(call: Call) -> None:
    weights = random_experts(bias=True)
    experts = layer(weights)
    y = experts(*call)
    for only in (None, 3):
        message = rf"update, expert {only or 0} gate_bias: expected torch\.bfloat16, got torch\.float32"
        with pytest.raises(PlanError, match=message):
            experts.update(with_bias_dtype(weights, torch.float32, only))
        assert torch.equal(experts(*call), y)
    with pytest.raises(PlanError, match=r"expert 3 gate_bias: expected torch\.bfloat16, as in the experts before it"):
        layer(with_bias_dtype(weights, torch.float32, 3))
    wide = layer(with_bias_dtype(weights, torch.float32))
    wide.update(with_bias_dtype(random_experts(bias=True, seed=5), torch.float32), check=True)


def test_input_scales_that_the_layer_has_no_place_for_are_refused(call: Call) -> None:
    weights = random_experts("nvfp4")
    experts = layer(weights)
    y = experts(*call)
    with pytest.raises(
        PlanError, match="update, expert 0 gate_up_input_scale: expected none, as in the packed experts"
    ):
        experts.update(with_input_scales(weights))
    assert torch.equal(experts(*call), y)
    scaled = layer(with_input_scales(weights))
    scaled.update(weights)  # experts without them: they were not calibrated
    assert scaled.weights.expert(0).gate_up_input_scale is None
    scaled.update(with_input_scales(weights), check=True)
    own = scaled.weights  # read from itself, so packed aside
    scaled.update(
        ExpertWeights(own.spec, lambda e: replace(own.expert(e), gate_up_input_scale=None, down_input_scale=None)),
        check=True,
    )
    assert scaled.weights.expert(0).gate_up_input_scale is None


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4", "fp8_block128", "bf16"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_writes_to_out(format: str, backend: str, call: Call) -> None:
    experts = layer(random_experts(format))
    run, out = compiled(experts, backend), torch.empty_like(call[0])
    assert torch.equal(run(*call), experts(*call))
    assert torch.equal(run(*call, out=out), experts(*call))
    assert torch.equal(out, experts(*call))


def test_an_exported_graph_outlives_the_module(call: Call) -> None:
    experts = layer()
    y = experts(*call)
    graph = torch.export.export(experts, call).module()
    del experts
    gc.collect()
    assert torch.equal(graph(*call), y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_layer_follows_other_routings(call: Call) -> None:
    experts = layer()
    traced = torch.jit.trace(experts, call)
    x, routing = random_call(6, 64, 5, seed=3)
    assert torch.equal(traced(x, *routing), experts(x, *routing))


PROCESS = """
import sys, torch
from polymoe.errors import PlanError
import polymoe.layer.experts
from support.problems import random_experts
from polymoe.problem.activations import SwiGLU
from polymoe.layer.experts import FusedExperts
program, call, y = torch.load(sys.argv[1], weights_only=False)
graph = torch.export.load(program).module()
try:
    graph(*call)
except PlanError as error:
    assert "load the experts as before the export" in str(error), error
else:
    raise AssertionError
experts = FusedExperts.from_weights(random_experts(), SwiGLU(), top_k=2, device="cpu")
assert torch.equal(graph(*call), y)
"""


@pytest.mark.slow
def test_an_exported_graph_in_another_process_says_what_it_needs(call: Call, tmp_path: Path) -> None:
    experts = layer()
    torch.export.save(torch.export.export(experts, call), tmp_path / "graph.pt2")
    torch.save((str(tmp_path / "graph.pt2"), call, experts(*call)), tmp_path / "call")
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(tmp_path / "call")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


def test_share_memory_shares_the_packed_tensors(call: Call) -> None:
    experts = layer()
    y = experts(*call)
    assert not any(b.is_shared() for b in experts.buffers())
    model = torch.nn.Sequential(experts)
    model.share_memory()
    assert all(b.is_shared() for b in experts.buffers())
    assert torch.equal(experts(*call), y)


def test_an_update_that_waits_for_calls(call: Call) -> None:
    experts = layer(backend="reference")
    started, go = threading.Event(), threading.Event()
    y, results = experts(*call), list[Tensor]()
    step = experts._runtime.step(torch.float32, 6)

    class Slow:
        options = frozenset[str]()

        def run(self, given: Any, config: Any) -> None:
            started.set()
            go.wait(20)
            step.runner.run(given, config)

    experts._runtime.steps(torch.float32)[:] = [replace(step, runner=Slow())]  # type: ignore[arg-type]
    caller = threading.Thread(target=lambda: results.append(experts(*call)))
    caller.start()
    assert started.wait(20)
    updater = threading.Thread(target=lambda: experts.update(random_experts(seed=5), wait=True))
    updater.start()
    while not experts._layer.incomplete:
        assert updater.is_alive()
    with pytest.raises(PlanError, match="has not finished"):
        experts(*call)
    assert updater.is_alive()
    go.set()
    caller.join(20)
    updater.join(20)
    assert torch.equal(results[0], y)
    assert torch.equal(experts(*call), layer(random_experts(seed=5), backend="reference")(*call))


def test_updates_from_two_threads_come_one_after_the_other(call: Call) -> None:
    experts, reading, go = layer(backend="reference"), threading.Event(), threading.Event()
    weights, seen = random_experts(seed=5), list[int]()

    def read(e: int) -> Expert:
        seen.append(e)
        if seen.count(2) == 2 and not go.is_set():  # the layer holds new and old experts
            reading.set()
            assert go.wait(20)
        return weights.expert(e)

    first = threading.Thread(target=experts.update, args=(ExpertWeights(weights.spec, read),))
    second = threading.Thread(target=experts.update, args=(random_experts(seed=6),))
    first.start()
    assert reading.wait(20)
    second.start()
    second.join(0.5)
    go.set()
    first.join(20)
    second.join(20)
    assert torch.equal(experts(*call), layer(random_experts(seed=6), backend="reference")(*call))
