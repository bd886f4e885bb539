"""Calls that miss exactly so many experts, and what cannot be made of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import slots_plot  # type: ignore
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polymoe.bench import slots
from polymoe.bench.cases import Workload
from polymoe.bench.records import Record
from polymoe.bench.slots import missing_calls, slot_rows
from polymoe.bench.timing import Timing
from polymoe.errors import ArgumentError
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.slots import LeastRecentlyUsed
from polymoe.machine import Machine
from support.problems import GPT_OSS, problem_of, random_experts
from support.tiny import bench


@pytest.mark.parametrize(("experts", "top_k"), [(128, 4), (256, 6), (160, 8), (384, 8), (16, 4)])
def test_each_call_misses_so_many_experts_however_often_the_cycle_runs(experts: int, top_k: int) -> None:
    for misses in range(top_k + 1):
        cache = LeastRecentlyUsed(experts // 4)
        calls = missing_calls(experts, experts // 4, top_k, misses)
        assert all(len(set(call)) == top_k and min(call) >= 0 and max(call) < experts for call in calls)
        for repetition in range(4):
            found = {len(cache.place(sorted(call))) for call in calls}
            assert repetition == 0 or found == {misses}


@pytest.mark.parametrize(("experts", "slots", "misses"), [(16, 4, 5), (16, 4, -1), (9, 8, 4)])
def test_calls_that_do_not_exist(experts: int, slots: int, misses: int) -> None:
    with pytest.raises(ArgumentError, match="misses"):
        missing_calls(experts, slots, 4, misses)


COPY_US, BYTES_PER_US = 2.0, 50_000.0
"""Of a simulated link: what each copy takes, and its rate."""


class _Host(OffloadedExperts):
    """Offloaded experts whose tensors in host memory are known."""

    storages: ClassVar[set[int]] = set()

    def __init__(self, resident: FusedExperts, slots: int) -> None:
        super().__init__(resident, slots)
        self.storages.update(t.untyped_storage().data_ptr() for t in self._host.tensors)


class _Simulated(TorchDispatchMode):
    """Calls whose time is that of the copies from host memory that they make."""

    def __init__(self, calls: Sequence[Callable[[], None]], device: torch.device, *, graph: bool) -> None:
        super().__init__()
        self.calls, self.us = calls, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() in _Host.storages:
            self.us += COPY_US + args[1].nbytes / BYTES_PER_US
        return func(*args, **(kwargs or {}))

    def __call__(self) -> None:
        for call in self.calls:
            call()

    def time(self, repeats: int, *, rest_seconds: float = 0.0) -> Timing:
        self()
        self.us = 0.0
        with self:
            self()
        us = max(self.us, 1.0) / len(self.calls)
        return Timing(us, us, us, "calls")


def test_no_time_is_below_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """However experts are copied: the floor counts those that have to cross, at a rate that no copy exceeds. Layers of
    a stack miss what is not in their slots."""
    weights = random_experts("mxfp4", experts=16, bias=True)
    workload = Workload("case", problem_of(weights, GPT_OSS), weights)
    resident = FusedExperts.from_weights(weights, GPT_OSS, top_k=2, device="cpu", backend="reference")
    monkeypatch.setattr(slots, "packed_layer", lambda *_: resident)
    monkeypatch.setattr(slots, "TimedCalls", _Simulated)
    monkeypatch.setattr(slots, "OffloadedExperts", _Host)
    machine = Machine.of("cpu")
    memory = replace(machine.device, bandwidth=1e15, flops_16bit=1e18)  # the link is what takes time
    run = bench(workload=workload, machine=replace(machine, device=memory))
    rows = list(slot_rows(run, 4, (0, 1, 2), (8, 300)))
    assert not [row.note for row in rows if row.wrong]
    records = [row.record for row in rows if row.record is not None and row.backend != "resident"]
    assert [r.case.removeprefix("case") for r in records] == [
        "[4 slots, 0 misses]", "[4 slots, 1 misses]", "[4 slots, 2 misses]", "[4 slots]", "[4 slots][stack of 12]"
    ]  # fmt: skip
    assert all(r.median_us >= r.floor_us for r in records)
    assert records[1].floor_us > 0
    assert rows[-1].note == "12 misses"
    with pytest.raises(ArgumentError, match=r"slots: expected 2 .* to 15 .*got 16"):
        next(slot_rows(run, 16, (0, 1, 2), (8,)))


def test_the_picture(tmp_path: Path) -> None:
    """A line for each case, in order of misses or tokens; of stacks the deepest, and no resident layer."""
    pytest.importorskip("matplotlib")
    one = {"backend": "cuda", "format": "mxfp4", "activations": "16bit", "routing": "cycle", "share": 1.0, "error": 0.0}
    one |= {
        "error_exact": 0.0,
        "device": "h100",
        "torch": "2",
        "triton": None,
        "commit": "a",
        "date": "",
        "command": "",
    }

    def record(case: str, tokens: int, us: float) -> Record:
        return Record(**one, case=case, tokens=tokens, median_us=us, p25_us=us, p75_us=us, floor_us=us - 1)

    records = [record(f"a[4 slots, {misses} misses]", 1, 10 + misses) for misses in (2, 0, 1)]
    records += [record("a[4 slots][stack of 4]", tokens, 30 + tokens) for tokens in (1024, 4096)]
    records += [record("a[4 slots][stack of 12]", 4096, 40), record("a[4 slots]", 8, 20), record("a", 1, 5)]
    assert slots_plot.by_misses(records) == {"a, 4 slots": [(0, 10, 9), (1, 11, 10), (2, 12, 11)]}
    assert slots_plot.by_tokens(records) == {"a, 4 slots": [(8, 20, 19), (4096, 40, 39)]}
    slots_plot.plot(records, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
