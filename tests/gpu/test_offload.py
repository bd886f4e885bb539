"""OffloadedExperts on a GPU: bitwise the resident layer, whatever the slots hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.slots import LeastRecentlyUsed
from support.problems import GPT_OSS, random_experts

EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 512, 256


def layer(format: str, backend: str, seed: int = 0) -> FusedExperts:
    bias = not format.startswith("fp8")
    weights = random_experts(format, experts=EXPERTS, hidden=HIDDEN, intermediate=WIDTH, bias=bias, seed=seed)
    activations = "fp8_group128" if format.startswith("fp8") else "16bit"
    return FusedExperts.from_weights(
        weights, GPT_OSS, top_k=TOP_K, device="cuda", backend=backend, activations=activations
    )


def call(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOP_K]
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    return x.cuda(), ids.cuda(), torch.rand(tokens, TOP_K, generator=g).cuda()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "fp8_block128", "bf16"])
@pytest.mark.parametrize("slots", [TOP_K, 6, EXPERTS - 1])
def test_bitwise_the_resident_layer(format: str, backend: str, slots: int) -> None:
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an SM90 GPU")
    resident, offloaded = layer(format, backend), OffloadedExperts(layer(format, backend), slots)
    for seed in range(35):
        arguments = call((1, 1, 1, 2, 7, 64, 1024)[seed % 7], seed)
        assert torch.equal(offloaded(*arguments), resident(*arguments)), seed
    stats = offloaded.cache_stats()
    assert stats["hits"]
    assert stats["misses"]
    assert stats["sweeps"]
    weights = random_experts(
        format, experts=EXPERTS, hidden=HIDDEN, intermediate=WIDTH, bias=resident.problem.spec.bias, seed=1
    )
    for experts in (resident, offloaded):
        experts.update(weights, check=True)
    arguments = call(1, 0)
    assert torch.equal(offloaded(*arguments), resident(*arguments))
    assert all(t.is_pinned() for t in offloaded._host.tensors if t.numel())


def test_streams_wait_for_each_other() -> None:
    resident, offloaded = layer("mxfp4", "auto"), OffloadedExperts(layer("mxfp4", "auto"), TOP_K)
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = [call((1, 16)[seed % 3 == 0], seed) for seed in range(60)]
    expected = [resident(*arguments) for arguments in calls]
    torch.cuda.synchronize()
    got = []
    for at, arguments in enumerate(calls):
        with torch.cuda.stream(streams[at % 2]):
            got.append(offloaded(*arguments))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("streams", [1, 2])
def test_prompts_through_a_stack(streams: int) -> None:
    """Experts of the next layer are copied ahead; between prompts, calls and updates change what is in slots."""
    resident = [layer("mxfp4", "auto", seed) for seed in range(5)]
    offloaded = [OffloadedExperts(layer("mxfp4", "auto", seed), 6) for seed in range(5)]
    used = [torch.cuda.Stream() for _ in range(streams)]
    for turn in range(20):
        arguments = call(256 + turn, turn)
        few = call(1, turn)
        expected = [[experts(*a).clone() for a in (arguments, few)] for experts in resident]
        torch.cuda.synchronize()
        with torch.cuda.stream(used[turn % streams]):
            got = [[experts(*a) for a in (arguments, few)[: 1 + turn % 2]] for experts in offloaded]
        torch.cuda.synchronize()
        for ours, theirs in zip(got, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=False)), turn
        if turn % 7 == 6:
            new = random_experts("mxfp4", experts=EXPERTS, hidden=HIDDEN, intermediate=WIDTH, bias=True, seed=turn)
            for experts in (resident[turn % 5], offloaded[turn % 5]):
                experts.update(new)
    assert len(offloaded[0]._shared.buffers) == 2


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("format", ["mxfp4", "fp8_block128"])
def test_replays_of_a_graph_are_bitwise_the_resident_layer(format: str, backend: str) -> None:
    """1,000 replays with changing ids; between them calls outside the graph, sweeps and updates."""
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an SM90 GPU")
    resident, offloaded = layer(format, backend), OffloadedExperts(layer(format, backend), 8)
    for tokens in (1, 2):
        x, ids, weights = call(tokens, 0)
        offloaded(x, ids, weights)
        torch.cuda.synchronize()
        before = offloaded.cache_stats()["misses"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = offloaded(x, ids, weights)
        for step in range(1000):
            for to, made in zip((x, ids, weights), call(tokens, step), strict=True):
                to.copy_(made)
            graph.replay()
            assert torch.equal(y, resident(x, ids, weights)), step
            if step % 100 == 50:
                arguments = call((1, 64)[step % 200 == 50], step)
                assert torch.equal(offloaded(*arguments), resident(*arguments))
            if step == 500:
                bias = resident.problem.spec.bias
                new = random_experts(format, experts=EXPERTS, hidden=HIDDEN, intermediate=WIDTH, bias=bias, seed=tokens)
                for experts in (resident, offloaded):
                    experts.update(new)
        assert offloaded.cache_stats()["misses"] > before


def test_placement_is_that_of_the_model() -> None:
    """As LeastRecentlyUsed, on random calls of up to as many ids as slots."""
    offloaded, cache, misses = OffloadedExperts(layer("mxfp4", "auto"), 8), LeastRecentlyUsed(8), 0
    for seed in range(2000):
        x, ids, weights = call(1 + seed % 2, seed)
        offloaded(x, ids, weights)
        misses += len(cache.place(sorted(ids.unique().tolist())))
        if seed % 50 == 0:
            assert offloaded._slots.residents() == cache.slot_of
    assert offloaded._slots.residents() == cache.slot_of
    assert offloaded.cache_stats()["misses"] == misses


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "fp8_block128", "bf16"])
def test_a_capture_of_more_ids_than_slots_is_bitwise_the_resident_layer(format: str, backend: str) -> None:
    """In waves, of 9 tokens too: 36 ids, as many as one warp and the GEMMs themselves do not sort. Runners convert
    float16, so that its waves are not a loop."""
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an SM90 GPU")
    for slots, tokens in ((TOP_K, 2), (6, 9), (7, 64), (EXPERTS - 1, 300)):
        resident, offloaded = layer(format, backend), OffloadedExperts(layer(format, backend), slots)
        x, ids, weights = call(tokens, 0)
        x = x.half() if tokens == 9 else x
        offloaded(x, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = offloaded(x, ids, weights)
        for step in range(40):
            for to, made in zip((x, ids, weights), call(tokens, step), strict=True):
                to.copy_(made)
            if step % 4 == 3:  # fewer experts than slots, and ids of none: waves are empty
                ids.clamp_(0, 2)
                ids[0, 0] = -1
            graph.replay()
            assert torch.equal(y, resident(x, ids, weights)), (slots, tokens, step)
            if step % 8 == 7:
                arguments = call((1, 64)[step % 16 == 7], step)
                assert torch.equal(offloaded(*arguments), resident(*arguments))
