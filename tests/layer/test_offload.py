"""OffloadedExperts: results of a resident layer, whatever the slots hold; placement; bad input."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polymoe
from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.errors import ArgumentError, CheckpointError, PlanError, UnsupportedProblem
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.slots import NEXT_WAVE, SlotLaunches
from polymoe.kernels.cuda.targets import SM90
from polymoe.layer import host_store, sweep
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.runtime import BoundStep
from polymoe.layer.slots import CpuSlots, GpuSlots, LeastRecentlyUsed, run_in_waves
from polymoe.layer.sweep import Buffer, CopyStream
from polymoe.layouts import Packed
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import gpu, pack
from support.cuda_emulator import Emulator, compile_units, emulated
from support.problems import GPT_OSS, problem_of, random_call, random_experts, torn

ROOT = Path(__file__).parents[2]
SUMS = ROOT / "models" / "sums-gpt-oss-mxfp4"
EXPERTS, TOP_K = 8, 2


def layer(backend: str = "reference", seed: int = 0, format: str = "mxfp4") -> FusedExperts:
    weights = random_experts(format, bias=True, experts=EXPERTS, seed=seed)
    return FusedExperts.from_weights(weights, GPT_OSS, top_k=TOP_K, device="cpu", backend=backend)


def call(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x, routing = random_call(tokens, 64, EXPERTS, TOP_K)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    return x, ids, routing.topk_weights_TA


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("slots", [2, 3, 7])
def test_one_token(backend: str, slots: int) -> None:
    resident, offloaded = layer(backend), OffloadedExperts(layer(backend), slots)
    for seed in range(40):
        x, ids, weights = call(1, seed)
        assert relative_error(offloaded(x, ids, weights), resident(x, ids, weights)) < 1e-6
    stats = offloaded.cache_stats()
    assert stats["hits"] + stats["misses"] == 80
    assert stats["hits"]
    assert stats["misses"]
    assert stats["copied_bytes"] == stats["misses"] * offloaded.expert_bytes


@pytest.mark.parametrize("tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "fp8_block128", "bf16"])
def test_calls_that_need_more_experts_than_slots(format: str, tokens: int) -> None:
    resident, offloaded = layer(format=format), OffloadedExperts(layer(format=format), 3)
    for seed in range(4):
        arguments = call(tokens, seed)
        assert relative_error(offloaded(*arguments), resident(*arguments)) < 1e-6
    assert (offloaded.cache_stats()["sweeps"] > 0) == (tokens > 1)


def test_a_sweep_is_bitwise_the_resident_layer_and_keeps_the_slots() -> None:
    resident, offloaded = layer(), OffloadedExperts(layer(), 3)
    offloaded(*call(1, 0))
    before = offloaded._slots.residents()
    arguments = call(64, 1)
    assert torch.equal(offloaded(*arguments), resident(*arguments))
    assert offloaded._slots.residents() == before


def test_ids_of_no_expert_and_duplicates() -> None:
    resident, offloaded = layer(), OffloadedExperts(layer(), 3)
    x, _, weights = call(2, 0)
    ids = torch.tensor([[-1, EXPERTS], [4, 4]])
    assert torch.equal(offloaded(x, ids, weights), resident(x, ids, weights))
    assert offloaded.cache_stats()["misses"] == 1
    with pytest.raises(ArgumentError, match="topk_ids_TA"):
        offloaded(x, ids + 5, weights)
    assert offloaded(x[:0], ids[:0], weights[:0]).shape == (0, 64)


def test_layers_share_one_buffer() -> None:
    layers = [layer(seed=seed) for seed in range(2)]
    first, second = (OffloadedExperts(layer(seed=seed), 2) for seed in range(2))
    assert first._shared is second._shared
    for seed in range(3):
        arguments = call(16, seed)
        for resident, offloaded in zip(layers, (first, second), strict=True):
            assert torch.equal(offloaded(*arguments), resident(*arguments))


class LateCopies(CopyStream):
    """Copies that land when they are waited for, not before."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queued: list[tuple[Any, Buffer]] = []
        self.to: list[Buffer] = []

    def enqueue(self, copies: Any, to: Buffer) -> None:
        self.queued.append((copies, to))
        self.to.append(to)

    def wait(self, buffer: Buffer) -> None:
        while any(to is buffer for _, to in self.queued):
            self.queued.pop(0)[0]()

    def synchronize(self) -> None:
        while self.queued:
            self.queued.pop(0)[0]()


def stack(count: int) -> tuple[list[FusedExperts], list[OffloadedExperts], LateCopies]:
    """Resident layers, offloaded ones that share buffers, and the copies to these, whose contents start as NaN."""
    resident = [layer(seed=seed) for seed in range(count)]
    offloaded = [OffloadedExperts(layer(seed=seed), 3) for seed in range(count)]
    shared = offloaded[0]._shared
    shared.copies = copies = LateCopies()
    for tensor in shared.buffers[0].tensors:
        tensor.view(torch.uint8).fill_(255)
    return resident, offloaded, copies


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_experts_of_the_next_layer_are_copied_ahead(count: int) -> None:
    """Once in each sweep but where there is no other layer; with calls between them that change the slots."""
    resident, offloaded, copies = stack(count)
    for turn in range(4):
        made = len(copies.to)
        for number in range(count):
            if turn > 1 and number % 2:
                few = call(1, turn)
                assert relative_error(offloaded[number](*few), resident[number](*few)) < 1e-6
            arguments = call(64, turn + number)
            assert torch.equal(offloaded[number](*arguments), resident[number](*arguments))
        ahead = sum(b.owner is not None for b in offloaded[0]._shared.buffers)
        assert ahead == (turn > 0 and count > 1)
        assert len(copies.to) - made >= count
    stats = offloaded[-1].cache_stats()
    assert stats["sweeps"] == 4
    assert stats["copied_bytes"] >= stats["misses"] * offloaded[0].expert_bytes


@pytest.mark.parametrize("piece_bytes", [0, sweep._PIECE_BYTES])
def test_sweeps_in_another_order_than_last_time(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """With 0, no tensor is copied as a whole, and rows that come from slots must not be overwritten by late copies."""
    monkeypatch.setattr(sweep, "_PIECE_BYTES", piece_bytes)
    resident, offloaded, _ = stack(4)
    rng = random.Random(0)
    for seed in range(60):
        number = rng.randrange(4)
        arguments = call((64, 64, 1, 64, 3)[seed % 5], seed)  # of one token: slots are filled
        assert relative_error(offloaded[number](*arguments), resident[number](*arguments)) < 1e-6
    for number, left in ((0, 1), (1, 3), (3, 1), (1, 0)):  # one of them is gone
        if number == 3:
            offloaded[2], resident[2] = offloaded[0], resident[0]
            gc.collect()
        for at in (number, left):
            arguments = call(64, at)
            assert torch.equal(offloaded[at](*arguments), resident[at](*arguments))


def test_an_update_while_experts_are_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would still land in the buffer lands before the update takes the new experts from it."""
    resident, offloaded, copies = stack(3)
    arguments = call(64, 0)
    offloaded[0](*arguments)
    assert copies.queued  # of the second layer
    host = offloaded[1]._host
    take = host.copy_from
    monkeypatch.setattr(host, "copy_from", lambda tensors: (copies.synchronize(), take(tensors)))
    new = random_experts("mxfp4", bias=True, experts=EXPERTS, seed=7)
    for experts in (resident[1], offloaded[1]):
        experts.update(new)
    for number in (1, 2, 0, 1):
        assert torch.equal(offloaded[number](*arguments), resident[number](*arguments))


def test_without_memory_for_a_second_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, offloaded, copies = stack(3)

    def refuse(tensor: Tensor) -> Tensor:
        raise torch.cuda.OutOfMemoryError("no memory")

    arguments = call(64, 0)
    for _ in range(2):
        for number in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty_like", refuse)
                got = offloaded[number](*arguments, out=torch.zeros(64, 64))
            assert torch.equal(got, resident[number](*arguments))
    assert len(offloaded[0]._shared.buffers) == 1
    assert not copies.queued


def test_calls_that_need_few_experts_copy_nothing_ahead() -> None:
    resident, offloaded, copies = stack(2)
    x, _, weights = call(8, 0)
    ids = torch.arange(16).view(8, 2) % (EXPERTS - 2)
    assert torch.equal(offloaded[0](x, ids, weights), resident[0](x, ids, weights))
    assert not copies.queued
    assert offloaded[0].cache_stats()["sweeps"] == 1


def test_update_empties_the_slots() -> None:
    resident, offloaded = layer(seed=1), OffloadedExperts(layer(seed=0), 3)
    arguments = call(1, 0)
    offloaded(*arguments)
    offloaded.update(random_experts("mxfp4", bias=True, experts=EXPERTS, seed=1), check=True)
    assert relative_error(offloaded(*arguments), resident(*arguments)) < 1e-6
    assert torch.equal(offloaded.weights.dequantize()[0], resident.weights.dequantize()[0])
    offloaded.check()


def test_an_update_that_fails_changes_nothing() -> None:
    resident, offloaded = layer(), OffloadedExperts(layer(), 3)
    new = torn(random_experts("mxfp4", bias=True, experts=EXPERTS, seed=1))
    with pytest.raises(CheckpointError):
        offloaded.update(new)
    arguments = call(1, 0)
    assert relative_error(offloaded(*arguments), resident(*arguments)) < 1e-6
    arguments = call(32, 0)
    assert torch.equal(offloaded(*arguments), resident(*arguments))


@pytest.mark.parametrize("taken", [False, True])
def test_an_update_from_its_own_experts(taken: bool) -> None:
    """Also from those of the resident layer, whose memory became the buffer that the new experts are packed in."""
    order = [3, 1, 0, 4, 2, 7, 6, 5]
    resident, expected = layer(seed=9), layer(seed=9)
    offloaded = OffloadedExperts(resident, 3)
    own, other = resident.weights if taken else offloaded.weights, expected.weights
    expected.update(ExpertWeights(other.spec, lambda e: other.expert(order[e])))
    offloaded.update(ExpertWeights(own.spec, lambda e: own.expert(order[e])), check=True)
    for tokens in (1, 32):
        arguments = call(tokens, 0)
        assert relative_error(offloaded(*arguments), expected(*arguments)) < 1e-6


def test_experts_of_inference_mode_are_updated_outside_it() -> None:
    with torch.inference_mode():
        offloaded = OffloadedExperts(layer(), 3)
    offloaded.update(random_experts("mxfp4", bias=True, experts=EXPERTS, seed=1), check=True)
    for tokens in (1, 32):
        arguments = call(tokens, 0)
        assert relative_error(offloaded(*arguments), layer(seed=1)(*arguments)) < 1e-6


def test_slots_follow_their_buffers() -> None:
    """Other code has replaced what is in them."""
    resident, offloaded = layer(), OffloadedExperts(layer(), 3)
    offloaded(*call(1, 0))
    for buffer in offloaded.buffers():
        buffer.data = torch.full_like(buffer, 127)
    for seed in range(6):
        arguments = call(1, seed)
        assert relative_error(offloaded(*arguments), resident(*arguments)) < 1e-6


def test_a_copy_that_fails_leaves_no_expert_in_a_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, offloaded = layer(), OffloadedExperts(layer(), 2)
    offloaded(*call(1, 0))
    tensors = offloaded._host.tensors
    monkeypatch.setattr(offloaded._slots, "host", [*tensors[:-1], tensors[-1][:0]])
    held = set(offloaded._slots.residents())
    miss = next(c for c in (call(1, seed) for seed in range(8)) if not held.issuperset(c[1][0].tolist()))
    with pytest.raises(IndexError):
        offloaded(*miss)
    monkeypatch.setattr(offloaded._slots, "host", tensors)
    for seed in range(8):
        arguments = call(1, seed)
        assert relative_error(offloaded(*arguments), resident(*arguments)) < 1e-6


class Recency:
    """Least recently used slots as they are defined: a table of what each slot holds and when it was needed."""

    def __init__(self, slots: int) -> None:
        self.rows: list[list[int]] = [[0, slot, -1] for slot in range(slots)]  # last use, slot, expert

    def place(self, needed: list[int], step: int) -> list[tuple[int, int]]:
        held = {row[2] for row in self.rows}
        free = sorted(row for row in self.rows if row[2] not in needed)
        placed = []
        for expert, (_, slot, _) in zip([e for e in needed if e not in held], free, strict=False):
            self.rows[slot][2] = expert
            placed.append((expert, slot))
        for row in self.rows:
            if row[2] in needed:
                row[0] = step
        return placed


def traces(count: int) -> Iterator[tuple[int, int, list[list[int]]]]:
    """Experts, slots, and the experts that each of 40 calls needs."""
    rng = random.Random(0)
    for _ in range(count):
        experts = rng.randrange(2, 24)
        slots = rng.randrange(1, experts)
        yield experts, slots, [sorted(rng.sample(range(experts), rng.randrange(0, slots + 1))) for _ in range(40)]


def test_placement_is_least_recently_used() -> None:
    for _, slots, calls in traces(200):
        cache, table = LeastRecentlyUsed(slots), Recency(slots)
        for step, needed in enumerate(calls, start=1):
            assert cache.place(needed) == table.place(needed, step)
            assert cache.slot_of == {e: slot for _, slot, e in table.rows if e >= 0}


@emulated
def test_kernels_place_and_fetch_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own source, emulated: placement, copies, and the ids of slots, those of no expert among them."""
    library = compile_units()
    for number, (experts, slots, calls) in enumerate(traces(12)):
        first, g = 5, torch.Generator().manual_seed(number)
        host = [torch.randint(256, (experts, size), dtype=torch.uint8, generator=g) for size in (16 * 4099, 4, 48)]
        rows = [torch.full((slots, t.shape[1]), 255, dtype=torch.uint8) for t in host]
        with monkeypatch.context() as patch:
            patch.setattr(modules, "kernel", Emulator(library, [], seed=number))
            launches = SlotLaunches(SM90, first, experts, rows, [t.data_ptr() for t in host])
            table, counts = Recency(slots), [0, 0]
            for step, needed in enumerate(calls[:10], start=1):
                local = [*needed, *needed[:1], -3, experts + 2]
                ids = torch.tensor(local, dtype=(torch.int32, torch.int64)[step % 2])[:, None] + first
                found = launches.run(ids, 0)
                placed = table.place(needed, step)
                counts = [counts[0] + len(needed) - len(placed), counts[1] + len(placed)]
                slot_of = {e: slot for _, slot, e in table.rows if e >= 0}
                assert found.flatten().tolist() == [first + slot_of[e] if e in needed else -1 for e in local]
                for expert, slot in slot_of.items():
                    assert all(torch.equal(t[slot], h[expert]) for t, h in zip(rows, host, strict=True))
                assert launches.residents() == [slot_of.get(e, -1) for e in range(experts)]
            assert list(launches.counts()) == counts


@emulated
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_kernels_place_short_traces(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Placement alone, of many sizes, by the emulated source."""
    monkeypatch.setattr(modules, "kernel", Emulator(compile_units(), []))
    for experts, slots, calls in traces(count):
        host = torch.arange(experts, dtype=torch.uint8)[:, None].repeat(1, 16)
        row, table = torch.empty(slots, 16, dtype=torch.uint8), Recency(slots)
        launches = SlotLaunches(SM90, 0, experts, [row], [host.data_ptr()])
        monkeypatch.setattr(launches, "_fetch", lambda stream: None)
        for step, needed in enumerate(calls[:4], start=1):
            launches.run(torch.tensor(needed, dtype=torch.int32)[:, None], 0)
            table.place(needed, step)
        slot_of = {e: slot for _, slot, e in table.rows if e >= 0}
        assert launches.residents() == [slot_of.get(e, -1) for e in range(experts)]


def waves_of(needed: list[int], table: Recency) -> list[list[int]]:
    """What is in a slot, then what is missing, as many at a time as there are slots."""
    held, count = {row[2] for row in table.rows}, len(table.rows)
    ordered = [e for e in needed if e in held] + [e for e in needed if e not in held]
    return [sorted(ordered[at : at + count]) for at in range(0, len(ordered), count)]


@emulated
def test_waves_place_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that need more experts than there are slots, by the kernel's source, emulated, and on a CPU. Waves that
    nobody needs place nothing."""
    rng, library = random.Random(1), compile_units()
    spec = random_experts("mxfp4", experts=20).spec
    for number in range(12):
        slots, first = rng.randrange(2, 19), spec.first_expert
        host = [torch.arange(20, dtype=torch.uint8)[:, None].repeat(1, 16)]
        rows, cpu_rows = ([torch.full((slots, 16), 255, dtype=torch.uint8)] for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(modules, "kernel", Emulator(library, [], seed=number))
            launches = SlotLaunches(SM90, first, 20, rows, [t.data_ptr() for t in host])
            cpu, table, step = CpuSlots(spec, cpu_rows, host), Recency(slots), 0
            for _ in range(6):
                needed = sorted(rng.sample(range(20), rng.randrange(0, 21)))
                ids = torch.tensor([*needed, *needed[:1], -1, 20])[:, None] + first
                waves = waves_of(needed, table)
                waves += [[]] * (-(-20 // slots) - len(waves))
                further, counted = ctypes.c_uint(2), rng.random() < 0.5  # by the host, or by the kernel itself
                for number, wave in enumerate(waves):
                    step += 1
                    table.place(wave, step)
                    slot_of = {e: slot for _, slot, e in table.rows if e >= 0}
                    expected = [first + slot_of[e] if e in wave else -1 for e in [*needed, *needed[:1], -1, 20]]
                    given = NEXT_WAVE if number and not counted else number
                    placed = launches.run(ids, 0, given, condition=ctypes.addressof(further))
                    assert placed.flatten().tolist() == expected
                    assert further.value == any(waves[number + 1 :])
                    assert cpu.place(ids, number).flatten().tolist() == expected
                    for expert, slot in slot_of.items():
                        assert int(rows[0][slot, 0]) == int(cpu_rows[0][slot, 15]) == expert
            assert launches.counts() == cpu.counts()


class LoopedSlots:
    """Waves as a CUDA graph's loop repeats them, by the condition that the kernel sets."""

    def __init__(self, launches: SlotLaunches) -> None:
        self.launches, self.further, self.ran = launches, ctypes.c_uint(2), 0

    def place(self, ids_TA: Tensor, wave: int = 0, slot_ids_TA: Tensor | None = None) -> Tensor:
        condition = ctypes.addressof(self.further)
        return self.launches.run(ids_TA, 0, wave, slot_ids_TA=slot_ids_TA, condition=condition)

    def waves(self, most: int, *, repeatable: bool) -> Iterator[int]:
        assert repeatable
        self.ran = 1
        yield 0
        while self.further.value:
            self.ran += 1
            assert self.ran <= most
            yield NEXT_WAVE


@pytest.mark.slow
@emulated
@pytest.mark.parametrize(
    ("format", "unit", "activations", "config"),
    [
        ("mxfp4", "w4a16_mma_mxfp4", "16bit", CudaConfig("w4a16_mma", 8, 64)),
        ("mxfp4", "w4a16_wgmma_mxfp4", "16bit", CudaConfig("w4a16_wgmma", 32)),
        ("mxfp4", "w4a8_mxfp4", "fp8_group128", CudaConfig("w4a8", 16)),
        ("bf16", "bf16_bf16", "16bit", CudaConfig("bf16", 64)),
    ],
)
def test_waves_of_the_cuda_kernels(
    monkeypatch: pytest.MonkeyPatch, format: str, unit: str, activations: str, config: CudaConfig
) -> None:
    """Bitwise a resident layer's results, by all kernels' own source, emulated: rows of y by expanded row in float32,
    and by permuted row in bfloat16."""
    weights = random_experts(format, experts=6, hidden=384, intermediate=256, bias=True)
    problem = problem_of(weights, GPT_OSS, activations=activations)
    packed = pack(problem, weights)
    host = list(packed.tensors.values())
    rows = {name: torch.full_like(t[:3].view(torch.uint8), 255).view(t.dtype) for name, t in packed.tensors.items()}
    monkeypatch.setattr(modules, "kernel", Emulator(compile_units(unit), [*host, *rows.values()]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(3))
    resident, runner = (CudaRunner(problem, p, SM90) for p in (packed, Packed(packed.layout, packed.spec, rows)))
    slots: Any = LoopedSlots(SlotLaunches(SM90, 0, 6, list(rows.values()), [t.data_ptr() for t in host]))
    ran = []
    for seed, tokens in enumerate((4, 20, 20, 2)):
        x, routing = random_call(tokens, 384, 6, 2, torch.bfloat16, seed=seed)
        routing.topk_ids_TA[0] = torch.tensor([-1, 6])
        expected, got = (torch.full_like(x, float("nan")) for _ in range(2))
        resident.run(CallArguments(x, *routing, expected), config)
        run_in_waves(slots, BoundStep(None, "cuda", runner, config), problem, CallArguments(x, *routing, got), 3)
        assert torch.equal(got, expected)
        assert expected.any()
        ran.append(slots.ran)
    assert min(ran) == 1
    assert max(ran) == 2


@pytest.mark.parametrize("slots", [1, EXPERTS, EXPERTS + 1])
def test_numbers_of_slots(slots: int) -> None:
    with pytest.raises(ArgumentError, match=f"slots.*2 .*to 7.*{slots}"):
        OffloadedExperts(layer(), slots)
    with pytest.raises(ArgumentError, match="slots"):
        polymoe.load_experts(SUMS, 1, device="cpu", slots=slots + 3 * (slots > 1))


def test_host_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "host_memory", lambda: (1000, 2000))
    with pytest.raises(PlanError, match=r"host memory for experts: expected .* for this layer, got 1000 B free of 2"):
        OffloadedExperts(layer(), 3)


def test_a_gpu_that_shares_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = layer()
    shared = replace(resident._plans.request.machine.device, unified_memory=True)
    request = replace(resident._plans.request, machine=replace(resident._plans.request.machine, device=shared))
    monkeypatch.setattr(resident._plans, "request", request)
    with pytest.raises(UnsupportedProblem, match=r"a GPU with memory of its own.*shares the host's"):
        OffloadedExperts(resident, 3)


@pytest.mark.parametrize("maps", [True, False])
def test_a_gpu_without_unified_addressing(monkeypatch: pytest.MonkeyPatch, maps: bool) -> None:
    """Kernels get the address that the driver gives host memory on the GPU, which is another one there. A GPU on which
    it has none is refused."""
    launched: list[tuple[Any, ...]] = []

    class MappingDriver:
        def cuMemHostGetDevicePointer_v2(self, found: Any, host: ctypes.c_void_p, flags: int) -> int:
            found._obj.value = (host.value or 0) + 4096
            return 0 if maps else 801

        def cuGetErrorString(self, code: int, text: Any) -> int:
            text._obj.value = b"operation not supported"
            return 0

    monkeypatch.setattr("polymoe.kernels.cuda.driver._open_driver", MappingDriver)
    monkeypatch.setattr("polymoe.layer.slots.SlotLaunches", lambda *given: launched.append(given))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    packed = layer().packed
    host = list(packed.tensors.values())
    rows = [tensor[:3].clone() for tensor in host]
    refused = r"experts in host memory: expected a GPU that reads page-locked host memory.*not supported \(801\).*hint"
    with nullcontext() if maps else pytest.raises(UnsupportedProblem, match=re.compile(refused, re.DOTALL)):
        GpuSlots(packed.spec, rows, host)
    assert [given[-1] for given in launched] == [[t.data_ptr() + 4096 for t in host if t.numel()]] * maps


def test_copies_wait_for_what_reads_their_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the copy stream: first the event after the last call on the buffer, then the copies, then what calls wait
    for."""
    happened: list[str] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            happened.append(f"waits for {event}")

    class Event:
        def record(self, stream: object) -> None:
            happened.append("copied")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    buffer: Any = Buffer([torch.empty(1)])
    buffer._done = "the last reader"
    copies = CopyStream(torch.device("cpu"))
    monkeypatch.setattr(copies, "stream", Stream())
    copies.enqueue(lambda: happened.append("copies"), buffer)
    assert happened == ["waits for the last reader", "copies", "copied"]
    assert buffer.copied is not None


class Driver:
    """Locks pages until the n-th call, or is interrupted there."""

    def __init__(self, most: int, interrupted: bool = False) -> None:
        self.most, self.interrupted = most, interrupted
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.locked) == self.most:
            if self.interrupted:
                raise KeyboardInterrupt
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_pages_that_cannot_all_be_locked_are_all_unlocked(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    monkeypatch.setattr(host_store, "host_memory", lambda: (5 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensors = [torch.empty(100), torch.empty(0), torch.empty(3), torch.empty(50)]
    for most in range(3):
        driver = Driver(most, interrupted)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)  # noqa: B023
        error = pytest.raises(KeyboardInterrupt if interrupted else PlanError)
        with error as caught:
            host_store.PageLocked(tensors)
        assert not driver.locked
        if not interrupted:
            message = str(caught.value)
            assert re.search(r"page-locked.*error 2, with 5.* GiB of 8.* free.*WSL", message, re.DOTALL)
            assert (f"{(0, 400, 412)[most]} B page-locked by this process already" in message) == (most > 0)
    driver = Driver(9)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    locked = host_store.PageLocked(tensors)
    assert list(driver.locked.values()) == [400, 12, 200]
    del locked
    gc.collect()
    assert not driver.locked


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_pages_are_touched_by_cpus_of_the_gpus_node(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = os.sched_getaffinity(0)
    one = min(everywhere)
    monkeypatch.setattr(host_store, "cpus_near", lambda device: {one, 4096} if device == 3 else set())
    for device, expected in (("cuda:3", {one}), ("cuda:0", everywhere), ("cpu", everywhere)):
        with host_store.near(torch.device(device)):
            assert os.sched_getaffinity(0) == expected
        assert os.sched_getaffinity(0) == everywhere


def test_what_is_refused() -> None:
    offloaded = OffloadedExperts(layer(), 3)
    with pytest.raises(UnsupportedProblem, match="to\\(device\\)"):
        offloaded.to("meta")
    with pytest.raises(UnsupportedProblem, match=r"pickle: .*got experts in host memory"):
        pickle.dumps(offloaded)
    with pytest.raises(UnsupportedProblem, match=r"share_memory\(\)"):
        offloaded.share_memory()
    with pytest.raises(UnsupportedProblem, match=r"torch\.export: .*got experts in host memory"):
        torch.export.export(offloaded, call(1, 0))
    with pytest.raises(UnsupportedProblem, match=r"torch\.export: .*got experts in host memory"):
        torch.jit.trace(offloaded, call(1, 0))
    x, ids, weights = call(1, 0)
    with pytest.raises(UnsupportedProblem, match=r"x_TH: .*a compiled graph has no backward"):
        torch.compile(offloaded, backend="aot_eager")(x.requires_grad_(), ids, weights)
    with pytest.raises(ArgumentError, match="expert_map"):
        offloaded(*call(1, 0), expert_map=torch.arange(EXPERTS))
    assert offloaded.to(torch.float16) is offloaded


def test_copies_share_the_experts() -> None:
    resident, offloaded = layer(), OffloadedExperts(layer(), 3)
    model = torch.nn.Sequential(offloaded)
    for twin in (copy.copy(offloaded), copy.deepcopy(offloaded), copy.deepcopy(model)[0]):
        assert twin is offloaded
        assert relative_error(twin(*call(2, 0)), resident(*call(2, 0))) < 1e-6


def test_in_a_compiled_graph() -> None:
    resident, offloaded = layer(), OffloadedExperts(layer(), 3)
    compiled = torch.compile(lambda *a: offloaded(*a) * 2, fullgraph=True, backend="aot_eager")
    for tokens in (1, 16):
        arguments = call(tokens, tokens)
        assert relative_error(compiled(*arguments), 2 * resident(*arguments)) < 1e-6


def test_slots_are_a_number() -> None:
    with pytest.raises(ArgumentError, match=r"slots: expected 2 slots .*, got '4slots'$"):
        polymoe.load_experts(SUMS, 1, device="cpu", slots="4slots")  # pyright: ignore[reportArgumentType]


def test_load_experts() -> None:
    resident = polymoe.load_experts(SUMS, 1, device="cpu")
    offloaded = polymoe.load_experts(SUMS, 1, device="cpu", slots=4)
    assert isinstance(offloaded, OffloadedExperts)
    x, routing = random_call(1, 192, 8, dtype=torch.bfloat16)
    assert relative_error(offloaded(x, *routing), resident(x, *routing)) < 4e-3
    assert "4 of 8 experts in slots" in repr(offloaded)
    assert str(offloaded.explain()) == str(resident.explain())


@pytest.mark.slow
def test_triton_is_bitwise_the_resident_layer() -> None:
    """In Triton's interpreter, which needs a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "support.offload_interpreted"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(lines) == 12
    assert all(line["equal"] for line in lines), lines
