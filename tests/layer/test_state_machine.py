"""Walks of packed layers, some with their experts in host memory, through their states, with the experts that each
should hold beside it in float64."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from polymoe.errors import CheckpointError, PlanError, UnsupportedProblem
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.problem.activations import SwiGLU
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from support.problems import plain_experts, problem_of, random_call, random_experts, with_input_scales

WALKS = {"none": (6, 15), "sample": (20, 25), "all": (150, 40)}
"""By ``--slow``: walks, and steps of each at most."""

FORMATS = ("mxfp4", "nvfp4", "int4_g32", "fp8_block128", "bf16")
EXPERTS, HIDDEN, WIDTH = 4, 32, 32
STEPS = {"taken": 0}

SLOTS = st.sampled_from((0, 0, 2, 3))
"""0: all experts are resident."""

Experts = tuple[Expert, ...]
Use = Callable[..., Tensor]


def made(format: str, bias: bool, seed: int) -> Experts:
    return tuple(random_experts(format, experts=EXPERTS, hidden=HIDDEN, intermediate=WIDTH, bias=bias, seed=seed))


def weights_of(experts: Experts) -> ExpertWeights:
    return ExpertWeights.of(experts)


class Twin:
    """A layer, what it should hold, and whether an update of it failed. Shallow copies and graphs share one."""

    def __init__(self, module: FusedExperts, experts: Experts) -> None:
        self.module, self.experts, self.whole = module, experts, True
        self.offloaded = isinstance(module, OffloadedExperts)
        self.uses: list[Use] = []


class PackedLayers(RuleBasedStateMachine):
    """Layers that are called, updated, copied, moved and compiled in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.twins: list[Twin] = []

    @initialize(
        format=st.sampled_from(FORMATS),
        bias=st.booleans(),
        backend=st.sampled_from(("torch", "reference")),
        slots=SLOTS,
    )
    def load(self, format: str, bias: bool, backend: str, slots: int) -> None:
        self.format, self.bias, self.backend = format, bias, backend
        self._load(0, slots, inference=False)

    def _load(self, seed: int, slots: int, *, inference: bool) -> None:
        experts = made(self.format, self.bias, seed)
        options: dict[str, Any] = {"top_k": 2, "device": "cpu", "backend": self.backend, "check": False}
        with torch.inference_mode(inference):
            module = FusedExperts.from_weights(weights_of(experts), SwiGLU(), **options)
            self.twins.append(Twin(OffloadedExperts(module, slots) if slots else module, experts))

    @precondition(lambda self: len(self.twins) < 4)
    @rule(seed=st.integers(0, 5), slots=SLOTS, inference=st.booleans())
    def load_another(self, seed: int, slots: int, inference: bool) -> None:
        self._load(seed, slots, inference=inference)

    def _twin(self, at: int) -> Twin:
        return self.twins[at % len(self.twins)]

    def _answers(self, twin: Twin, use: Use, seed: int, tokens: int = 3, **more: Any) -> None:
        x, routing = random_call(tokens, HIDDEN, EXPERTS, seed=seed)
        if not twin.whole:
            with pytest.raises(PlanError, match="got a mixture"):
                use(x, *routing, **more)
            return
        weights = weights_of(twin.experts)
        expected = plain_experts(weights, problem_of(weights), x, Routing(*routing))
        assert relative_error(use(x, *routing, **more), expected) < 1e-5

    @rule(at=st.integers(0, 9), seed=st.integers(0, 9), tokens=st.sampled_from((1, 3, 9)))
    def call(self, at: int, seed: int, tokens: int) -> None:
        self._answers(self._twin(at), self._twin(at).module, seed, tokens)

    @rule(at=st.integers(0, 9), out=st.booleans(), how=st.sampled_from(("inference", "autocast", "gradients")))
    def call_within(self, at: int, out: bool, how: str) -> None:
        within = {"inference": torch.inference_mode, "gradients": torch.enable_grad}
        with torch.autocast("cpu") if how == "autocast" else within[how]():
            more = {"out": torch.empty(3, HIDDEN)} if out else {}
            self._answers(self._twin(at), self._twin(at).module, 1, **more)

    @rule(at=st.integers(0, 9), seed=st.integers(0, 5))
    def call_for_a_gradient(self, at: int, seed: int) -> None:
        """Of x."""
        twin = self._twin(at)
        x, routing = random_call(3, HIDDEN, EXPERTS, seed=seed)
        x.requires_grad_()
        if not twin.whole:
            with pytest.raises(PlanError, match="got a mixture"):
                twin.module(x, *routing)
            return
        weights = weights_of(twin.experts)
        expected = plain_experts(weights, problem_of(weights), x, Routing(*routing))
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (twin.module(x, *routing), expected)]
        assert relative_error(*gradients) < 1e-5

    @rule(at=st.integers(0, 9))
    def call_from_threads(self, at: int) -> None:
        failed: list[BaseException] = []

        def one(seed: int) -> None:
            try:
                self._answers(self._twin(at), self._twin(at).module, seed)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed

    @rule(at=st.integers(0, 9), seed=st.integers(0, 5), check=st.booleans(), wait=st.booleans(), inside=st.booleans())
    def update(self, at: int, seed: int, check: bool, wait: bool, inside: bool) -> None:
        twin, new = self._twin(at), made(self.format, self.bias, seed)
        with torch.inference_mode(inside):
            twin.module.update(weights_of(new), check=check, wait=wait)
        twin.experts, twin.whole = new, True

    @rule(at=st.integers(0, 9), order=st.permutations(range(EXPERTS)), check=st.booleans())
    def update_from_itself(self, at: int, order: list[int], check: bool) -> None:
        twin = self._twin(at)
        if not twin.whole:
            with pytest.raises(PlanError, match="got a mixture"):
                _ = twin.module.weights
            return
        own = twin.module.weights
        twin.module.update(ExpertWeights(own.spec, lambda e: own.expert(order[e])), check=check)
        twin.experts = tuple(twin.experts[e] for e in order)

    @rule(at=st.integers(0, 9), of=st.integers(0, 9))
    def update_from_another(self, at: int, of: int) -> None:
        twin, other = self._twin(at), self._twin(of)
        if other.whole:
            twin.module.update(other.module.weights)
            twin.experts, twin.whole = other.experts, True

    @rule(at=st.integers(0, 9), seed=st.integers(0, 5), first=st.integers(0, EXPERTS - 1))
    def update_that_fails(self, at: int, seed: int, first: int) -> None:
        twin, new, seen = self._twin(at), made(self.format, self.bias, seed), set[int]()

        def read(e: int) -> Expert:
            if e == first and e in seen:
                raise CheckpointError(f"expert {e}", expected="a shard", got="a shorter one")
            seen.add(e)
            return new[e]

        with pytest.raises(CheckpointError, match=f"expert {first}"):
            twin.module.update(ExpertWeights(weights_of(new).spec, read))
        twin.whole = twin.whole and twin.offloaded  # host memory is written when all experts are packed

    @rule(at=st.integers(0, 9), seeds=st.permutations(range(6)))
    def update_from_threads(self, at: int, seeds: list[int]) -> None:
        """The last one counts, whichever that is."""
        twin, new = self._twin(at), [made(self.format, self.bias, seed) for seed in seeds[:2]]
        threads = [threading.Thread(target=twin.module.update, args=(weights_of(experts),)) for experts in new]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = twin.module.weights.expert(0).up.codes
        (twin.experts,) = [e for e in new if torch.equal(e[0].up.codes.reshape(found.shape), found)]
        twin.whole = True

    @rule(at=st.integers(0, 9), what=st.sampled_from(("format", "bias", "scales", "unreadable")))
    def update_that_is_refused(self, at: int, what: str) -> None:
        """Nothing changes: what follows would show it."""
        twin, own = self._twin(at), weights_of(made(self.format, self.bias, 3))

        def unreadable(e: int) -> Expert:
            if e == EXPERTS - 1:
                raise CheckpointError("expert", expected="a shard", got="none")
            return own.expert(e)

        other = {
            "format": weights_of(made("mxfp8", self.bias, 3)),
            "bias": weights_of(made(self.format, not self.bias, 3)),
            "scales": with_input_scales(own),
            "unreadable": ExpertWeights(own.spec, unreadable),
        }[what]
        with pytest.raises((PlanError, CheckpointError)):
            twin.module.update(other)

    @precondition(lambda self: len(self.twins) < 4)
    @rule(at=st.integers(0, 9), how=st.sampled_from(("deepcopy", "save")), inside=st.booleans())
    def copy_deeply(self, at: int, how: str, inside: bool) -> None:
        twin = self._twin(at)
        if twin.offloaded:  # copies are the layer itself
            assert copy.deepcopy(twin.module) is twin.module
            with pytest.raises(UnsupportedProblem, match="pickle"):
                pickle.dumps(twin.module)
            return
        with torch.inference_mode(inside):
            if how == "deepcopy":
                module = copy.deepcopy(twin.module)
            else:
                torch.save(twin.module, file := io.BytesIO())
                file.seek(0)
                module = torch.load(file, weights_only=False)
        self.twins.append(Twin(module, twin.experts))
        self.twins[-1].whole = twin.whole

    @rule(at=st.integers(0, 9))
    def copy_shallowly(self, at: int) -> None:
        twin = self._twin(at)
        if len(twin.uses) < 3:
            twin.uses.append(copy.copy(twin.module))

    @rule(at=st.integers(0, 9), how=st.sampled_from(("compile", "export")))
    def make_a_graph(self, at: int, how: str) -> None:
        twin = self._twin(at)
        if len(twin.uses) >= 3:
            return
        module = twin.module
        if how == "compile":
            torch._dynamo.reset()
            twin.uses.append(torch.compile(lambda *a: module(*a), fullgraph=True, backend="eager"))
            return
        x, routing = random_call(3, HIDDEN, EXPERTS)
        if twin.offloaded:
            with pytest.raises(UnsupportedProblem, match=r"torch\.export"):
                torch.export.export(module, (x, *routing))
            return
        twin.uses.append(torch.export.export(module, (x, *routing)).module())

    @rule(at=st.integers(0, 9), how=st.sampled_from(("to", "half", "share", "data")), inside=st.booleans())
    def move(self, at: int, how: str, inside: bool) -> None:
        module = self._twin(at).module
        if how == "share" and self._twin(at).offloaded:
            with pytest.raises(UnsupportedProblem, match="share_memory"):
                module.share_memory()
            return
        # A graph that was exported holds the tensors of before.
        graphs = [use for use in self._twin(at).uses if isinstance(use, torch.fx.GraphModule)]
        if how == "data" and not graphs:
            for buffer in module.buffers():
                buffer.data = buffer.data.clone()
        elif how in ("to", "half") or (how == "share" and not graphs):
            with torch.inference_mode(inside and how != "share"):
                {"to": lambda: module.to("cpu"), "half": module.half, "share": module.share_memory}[how]()

    @invariant()
    def all_hold_what_they_should(self) -> None:
        STEPS["taken"] += 1
        for twin in self.twins:
            for use in (twin.module, *twin.uses):
                self._answers(twin, use, 7)
            assert not any(b.is_inference() or b.requires_grad for b in twin.module.buffers())

    def teardown(self) -> None:
        """The experts can be read back as they were stored."""
        for twin in self.twins:
            for e in range(EXPERTS) if twin.whole else ():
                found = twin.module.weights.expert(e).parts()
                for name, part in twin.experts[e].parts().items():
                    assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (found[name], part))), name


@pytest.mark.timeout(3600)
def test_walks(request: pytest.FixtureRequest) -> None:
    walks, steps = WALKS[request.config.getoption("--slow")]
    chosen = settings(
        max_examples=walks, stateful_step_count=steps, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    run_state_machine_as_test(PackedLayers, settings=chosen)
    print(f"{STEPS['taken']} steps in {walks} walks")
