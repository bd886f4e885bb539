"""Runners are bound once to the tensors of a layer, and again where these move; layers that are alike share plans."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polymoe.layer.runtime
from polymoe.backends.base import Runner
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanCache
from polymoe.layouts import Packed
from polymoe.problem import Problem
from support.problems import problem_of, random_call, random_experts
from support.toys import Toy, ToyRunner, choice

Call = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Counting(Toy):
    """Notes each packed layer that it is bound to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bound", [])

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        self.bound.append(packed)  # type: ignore[attr-defined]
        return super().bind(problem, packed)


@pytest.fixture
def call() -> Call:
    x, routing = random_call(6, 64, 5)
    return x, *routing


@pytest.fixture
def backend() -> Any:
    return Counting("one")


def layer(backend: Toy, seed: int = 0, **kwargs: Any) -> FusedExperts:
    weights = random_experts(seed=seed)
    return FusedExperts.pack(problem_of(weights), weights, choice({backend.name: backend}), **kwargs)


def compiled(experts: FusedExperts) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda *a: experts(*a), fullgraph=True, backend="eager")


def test_a_layer_is_bound_once(backend: Any, call: Call) -> None:
    experts = layer(backend)
    y = experts(*call)
    experts.update(random_experts())
    assert torch.equal(experts(*call), y)
    (packed,) = backend.bound
    assert [t.data_ptr() for t in packed.tensors.values()] == [t.data_ptr() for t in experts.packed.tensors.values()]


def test_a_layer_is_bound_and_called_on_its_own_gpu(backend: Any, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a model's layers are spread over several GPUs, one of which is torch's current one."""
    current: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(polymoe.layer.runtime, "on_device", on_device)
    for name in ("bind", "run"):
        owner = Counting if name == "bind" else ToyRunner
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, own=own, **k: (seen.append(list(current)), own(*a, **k))[1])
    layer(backend, check=False)(*call)
    assert seen == [[torch.device("cpu")]] * 2


def test_a_copy_and_a_replaced_buffer_are_bound_again(backend: Any, call: Call) -> None:
    experts = layer(backend)
    y = experts(*call)
    copy = deepcopy(experts)
    for buffer in experts.buffers():
        buffer.view(torch.uint8).zero_()
    assert torch.equal(copy(*call), y)
    assert len(backend.bound) == 2
    assert not experts(*call).any()
    copy.register_buffer("packed_up_codes", torch.zeros_like(copy.packed_up_codes), persistent=False)
    assert not torch.equal(copy(*call), y)
    assert len(backend.bound) == 3


class Addresses(Toy):
    """As kernels do, it reads the addresses at which the tensors were when it was bound."""

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        views = {name: t.view_as(t) for name, t in packed.tensors.items()}
        return super().bind(problem, replace(packed, tensors=views))


def test_what_is_assigned_to_the_data_of_buffers_is_seen(call: Call) -> None:
    experts, other = layer(Addresses("one")), layer(Addresses("one"), seed=5)
    y, theirs = experts(*call), other(*call)
    mine = {name: buffer.data for name, buffer in experts.named_buffers()}
    for name, buffer in experts.named_buffers():
        buffer.data = other.get_buffer(name).data.clone()
    assert torch.equal(experts(*call), theirs)
    for name, buffer in experts.named_buffers():
        buffer.data = mine[name]
    assert torch.equal(experts(*call), y)


def test_a_compiled_graph_does_not_take_runners_whose_tensors_are_elsewhere(call: Call) -> None:
    experts, other = layer(Toy("one")), layer(Toy("one"), seed=5)
    theirs, mine = other(*call), [buffer.data for buffer in experts.buffers()]
    for buffer, theirs_now, old in zip(experts.buffers(), other.buffers(), mine, strict=True):
        buffer.data, theirs_now.data = torch.zeros_like(old), old.copy_(theirs_now.data)
    # ``other`` is where ``experts`` was, and no eager call has bound either of them again.
    assert torch.equal(compiled(other)(*call), theirs)
    assert not compiled(experts)(*call).any()


@pytest.mark.parametrize("change", [lambda e: e, lambda e: e.to("cpu"), deepcopy], ids=["loaded", "moved", "copied"])
def test_a_layer_that_only_compiled_graphs_call_is_bound_once(backend: Any, call: Call, change: Any) -> None:
    experts = layer(backend, check=False)
    y, changed = layer(Toy("one"))(*call), change(experts)
    run = compiled(changed)
    for _ in range(3):
        assert torch.equal(run(*call), y)
    assert len(backend.bound) == 1


@pytest.mark.parametrize("change", [lambda e: e.to("cpu"), lambda e: e._apply(lambda t: t)], ids=["to", "apply"])
def test_moving_drops_the_runners(call: Call, change: Any) -> None:
    """They may hold the weights where these were."""
    experts = layer(Toy("one"))
    experts(*call)
    runtime = weakref.ref(experts._runtime)
    change(experts)
    gc.collect()
    assert runtime() is None


def test_a_move_that_fails_leaves_the_layer_where_it_was(call: Call) -> None:
    experts = layer(Toy("one"))
    y = experts(*call)
    with pytest.raises(ValueError, match="meta"):
        experts.to("meta")
    assert torch.equal(experts(*call), y)


class TestPlanCache:
    """Layers that are alike share one, by a key that is the same in another process."""

    def test_key_by_names_and_classes(self) -> None:
        class Unprintable(Toy):
            def __repr__(self) -> str:
                raise RuntimeError("no text")

        backend = Unprintable("one")
        first, second = layer(backend), layer(backend, seed=5)
        assert first._plans is second._plans
        key = first._plans.key
        del first, second
        gc.collect()
        assert layer(Unprintable("one"))._plans.key == key
        assert layer(Unprintable("two"))._plans.key != key

    def test_other_backends_with_the_same_names_and_classes(self, call: Call) -> None:
        right, wrong = layer(Toy("one")), layer(Toy("one", error=0.5), check=False)
        assert right._plans.key != wrong._plans.key
        y = right(*call)
        for experts in (right, wrong):
            expected = y if experts is right else y * 1.5
            torch.testing.assert_close(experts(*call), expected)
            torch.testing.assert_close(compiled(experts)(*call), expected)

    def test_a_copy_shares_it(self) -> None:
        experts = layer(Toy("one"))
        assert deepcopy(experts)._plans is experts._plans

    def test_threads_make_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        init = PlanCache.__init__

        def slow(self: PlanCache, *args: Any) -> None:
            time.sleep(0.05)
            init(self, *args)

        monkeypatch.setattr(PlanCache, "__init__", slow)
        weights, found, start = random_experts(), [], threading.Barrier(4)
        request = choice({"one": Toy("one")})

        def make() -> None:
            start.wait()
            found.append(PlanCache.of(problem_of(weights), request, "flipped", (("up.codes", torch.uint8),)))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(plans) for plans in found}) == 1
