"""Layers on the CUDA backend, on an SM90 GPU: chosen, captured, compiled, updated, blind to the rest of a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.bench.cases import CASES, Workload
from polymoe.bench.records import Stamp
from polymoe.bench.tune import Tune
from polymoe.errors import ArgumentError, CheckpointError, PlanError, UnsupportedProblem
from polymoe.kernels.cuda.spec import W4A16_WGMMA
from polymoe.layer.experts import FusedExperts
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.measured import Table
from polymoe.planning.select import select
from polymoe.planning.table_files import read
from polymoe.problem.activations import SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.scale_range import measure_scales
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import need_sm90, same_experts
from support.problems import GPT_OSS, problem_of, random_call, torn

FORMATS = ["mxfp4", "nvfp4", "int4_g32", "int4_g128"]
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer(weights: ExpertWeights, backend: str = "cuda", **kwargs: Any) -> FusedExperts:
    return FusedExperts.from_weights(weights, GPT_OSS, top_k=3, device="cuda", backend=backend, **kwargs)


def call_of(tokens: int, hidden: int = 336, experts: int = 5, seed: int = 1) -> Call:
    x, routing = random_call(tokens, hidden, experts, 3, torch.bfloat16, seed=seed)
    return x.cuda(), routing.topk_ids_TA.cuda(), routing.topk_weights_TA.cuda()


def expected(experts: FusedExperts, weights: ExpertWeights, call: Call) -> torch.Tensor:
    x, ids, scores = (part.cpu() for part in call)
    return run_experts(experts.problem, weights, x, Routing(ids, scores))


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("format", FORMATS)
def test_auto_takes_it_for_every_number_of_tokens(format: str) -> None:
    # Launches weigh more than weights in a smaller layer, and Triton has fewer.
    weights = same_experts(format, experts=8, hidden=1024, intermediate=512, bias=True)
    experts = layer(weights, "auto")
    plan = experts.explain().require()
    assert (plan.layout, {step.backend for step in plan.steps}) == ("w4a16_fragments", {"cuda"})
    assert experts.packed.nbytes == LAYOUTS["w4a16_fragments"].nbytes(weights.spec)
    for tokens in (1, 7, 60, 500):
        call = call_of(tokens, 1024, 8)
        assert relative_error(experts(*call).cpu(), expected(experts, weights, call)) < TOLERANCE
    codes = experts.weights.expert(3).down.codes.cpu()
    assert torch.equal(codes, weights.expert(3).down.codes)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_default_device_and_x_at_an_odd_offset(backend: str) -> None:
    weights, call = same_experts(hidden=336, intermediate=272), call_of(5)
    with torch.device("cuda"):  # as torch.set_default_device
        experts = layer(weights, backend)
        x = torch.cat([call[0].new_zeros(1), call[0].flatten()])[1:].view(call[0].shape)
        y = experts(x, *call[1:])
    assert x.data_ptr() % 16
    assert relative_error(y.cpu(), expected(experts, weights, call)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 12, 200])
def test_compiled_graph_without_a_break(tokens: int) -> None:
    experts, call = layer(same_experts(hidden=336, intermediate=272)), call_of(tokens)
    compiled = torch.compile(lambda *a: experts(*a) + 1, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        assert torch.equal(compiled(*call), experts(*call) + 1)


@pytest.mark.parametrize(("activations", "hidden", "intermediate"), [("16bit", 336, 272), ("fp8_group128", 1024, 512)])
@pytest.mark.parametrize("tokens", [2, 200])
def test_a_captured_graph_sees_an_update(tokens: int, activations: str, hidden: int, intermediate: int) -> None:
    weights, other = (same_experts(hidden=hidden, intermediate=intermediate, seed=seed) for seed in (0, 5))
    experts, call = layer(weights, activations=activations), call_of(tokens, hidden)
    experts(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*call)
    addresses = [buffer.data_ptr() for buffer in experts.buffers()]
    for now in (other, weights):
        experts.update(now)
        assert [buffer.data_ptr() for buffer in experts.buffers()] == addresses
        graph.replay()
        assert relative_error(out.cpu(), expected(experts, now, call)) < TOLERANCE


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_after_an_update_that_failed_calls_raise_and_a_graph_follows_the_next_one(backend: str) -> None:
    weights, other = (same_experts(hidden=336, intermediate=272, seed=seed) for seed in (0, 5))
    experts, call = layer(weights, backend), call_of(2)
    experts(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*call)
    with pytest.raises(CheckpointError, match="expert 2"):
        experts.update(torn(other))
    with pytest.raises(PlanError, match="got a mixture"):
        experts(*call)
    experts.update(other, check=True)
    graph.replay()
    assert relative_error(out.cpu(), expected(experts, other, call)) < TOLERANCE
    assert torch.equal(experts(*call), out)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(("activations", "hidden", "intermediate"), [("16bit", 336, 272), ("fp8_group128", 1024, 512)])
@pytest.mark.parametrize("tokens", [2, 200, 1500])
def test_output_and_workspace_of_the_caller(
    backend: str, activations: str, hidden: int, intermediate: int, tokens: int
) -> None:
    weights = same_experts(hidden=hidden, intermediate=intermediate)
    experts, call = layer(weights, backend, activations=activations), call_of(tokens, hidden)
    y, out = experts(*call), torch.full_like(call[0], float("nan"))
    size = experts.workspace_bytes(tokens)
    memory = torch.full((size + 512,), 255, dtype=torch.uint8, device="cuda")
    workspace = memory[256 : size + 256]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert experts(*call, out=out, workspace=workspace) is out
    assert torch.cuda.max_memory_allocated() - before <= 4096  # nothing but small conversions of arguments
    assert torch.equal(out, y)
    assert bool((memory[:256] == 255).all() & (memory[-256:] == 255).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(*call, out=out, workspace=workspace)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, y)
    with pytest.raises(ArgumentError, match="workspace: expected at least"):
        experts(*call, workspace=workspace[: size // 2])


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_runners_follow_the_data_of_buffers(backend: str) -> None:
    weights, other = (same_experts(hidden=336, intermediate=272, seed=seed) for seed in (0, 5))
    experts, donor, call = layer(weights, backend), layer(other, backend), call_of(2)
    y, theirs = experts(*call), donor(*call)
    mine = {name: buffer.data for name, buffer in experts.named_buffers()}
    for name, buffer in experts.named_buffers():
        buffer.data = donor.get_buffer(name).data.clone()
    assert torch.equal(experts(*call), theirs)
    for name, buffer in experts.named_buffers():
        buffer.data = mine[name]
    assert torch.equal(experts(*call), y)


def test_moving_to_the_cpu_frees_the_gpu() -> None:
    call = call_of(2, 1024, 8)
    before = torch.cuda.memory_allocated()
    experts = layer(same_experts(experts=8, hidden=1024, intermediate=512), "auto")
    experts(*call)
    experts.to("cpu")
    assert torch.cuda.memory_allocated() - before < experts.packed.nbytes / 8


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_layer_of_a_named_backend_stays_where_that_backend_runs(backend: str) -> None:
    experts, call = layer(same_experts(hidden=336, intermediate=272), backend), call_of(2)
    y = experts(*call)
    with pytest.raises(UnsupportedProblem, match=f"on cpu: expected backend '{backend}' to run it"):
        experts.to("cpu")
    assert torch.equal(experts(*call), y)


@pytest.mark.parametrize("tokens", [2, 200])
def test_another_stream(tokens: int) -> None:
    experts, call = layer(same_experts("nvfp4", hidden=336, intermediate=272)), call_of(tokens)
    wanted = experts(*call)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = experts(*call)
    stream.synchronize()
    assert torch.equal(y, wanted)


def test_a_layer_of_wide_scales_goes_to_another_backend() -> None:
    same = same_experts(experts=8, hidden=1024, intermediate=512, bias=True)  # as above: hopper's, but for a scale

    def raised(e: int) -> Any:
        expert = same.expert(e)
        scales = expert.down.scales
        assert scales is not None
        raised = scales.clone()
        raised.view(torch.uint8)[5, 1] = 127 + 26
        return replace(expert, down=replace(expert.down, scales=raised))

    weights = ExpertWeights(same.spec, raised)
    experts = layer(weights, "auto")
    assert (experts.packed.layout, experts.problem.scales) == ("natural", measure_scales(weights))
    call = call_of(9, 1024, 8)
    assert relative_error(experts(*call).cpu(), expected(experts, weights, call)) < TOLERANCE


@pytest.mark.parametrize("activations", ["16bit", "fp8_group128"])
def test_tuning_writes_rows_that_plans_use(tmp_path: Path, activations: Any) -> None:
    device, machine = torch.device("cuda"), Machine.of("cuda")
    case = CASES["deepseek-v4-flash"].changed(experts=8, hidden=1024, intermediate=512)
    workload = Workload.of_case(case, device, activations=activations)
    stamp = Stamp(device="h200", torch="2", triton=None, commit="abc", command="polymoe tune")
    tune = Tune(
        workload=workload,
        machine=machine,
        device=device,
        backends=[Cuda()],
        file=tmp_path / "t.jsonl",
        stamp=stamp,
        seconds=20,
    )
    found = list(tune.outcomes((1, 64)))
    assert [(o.failed, o.note) for o in found] == [(0, "")] * 2
    rows = read(tmp_path / "t.jsonl")
    assert rows == [o.row for o in found]
    plan = select(workload.problem, machine, backend="cuda", table=Table((tuple(rows),))).require()
    for row in rows:
        assert plan.step(row.tokens).config == CudaConfig.from_dict(row.config)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(336, 272), (1024, 512)])
def test_a_token_does_not_see_its_batch(format: str, hidden: int, intermediate: int) -> None:
    """Each of 1000 tokens alone and among others, in other places: equal to the bit."""
    weights = same_experts(format, hidden=hidden, intermediate=intermediate, bias=True)
    experts, call = layer(weights, batch_invariant=True), call_of(1000, hidden)
    configs = {experts.explain().require().step(tokens).config for tokens in (1, 64, 300, 1000)}
    assert len(configs) > 1  # or this would show less than it says
    whole = experts(*call)
    assert relative_error(whole.cpu(), expected(experts, weights, call)) < TOLERANCE
    places = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).cuda()
    for size in (1, 2, 7, 64, 300):
        for some in places.split(size):
            assert torch.equal(experts(*(part[some] for part in call)), whole[some]), (size, some)


@pytest.mark.parametrize("format", [*FORMATS, "int4_g32_zp", "int4_g128_zp"])
@pytest.mark.parametrize("tokens", [1, 100, 700])
@pytest.mark.parametrize(("gated", "weight_on"), [(True, "output"), (False, "output"), (True, "input")])
def test_kernels_with_ordered_sums_add_up_alike(format: str, tokens: int, gated: bool, weight_on: str) -> None:
    """What the test above rests on: a row's sum does not depend on the width of the product it is part of."""
    weights = same_experts(format, hidden=1040, intermediate=336, gated=gated, bias=True)
    problem = problem_of(weights, SwiGLU() if gated else None, top_k=3, weight_on=weight_on)
    packed = LAYOUTS["w4a16_fragments"].pack(weights, torch.device("cuda"))
    x, ids_TA, weights_TA = call_of(tokens, 1040)
    configs = [CudaConfig("w4a16_mma_ordered", 8, 64), *(CudaConfig("w4a16_wgmma", m) for m in W4A16_WGMMA.tiles)]
    outs = [torch.empty_like(x) for _ in configs]
    for config, out in zip(configs, outs, strict=True):
        Cuda().bind(problem, packed).run(CallArguments(x, ids_TA, weights_TA, out), config)
    assert [torch.equal(out, outs[0]) for out in outs] == [True] * len(outs)
