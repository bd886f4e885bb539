"""Features of a Problem: every field, flipped on every backend, is handled as declared or is a reason."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from polymoe.backends import BACKENDS
from polymoe.backends.base import Backend, judge
from polymoe.backends.features import unhandled
from polymoe.backends.reference import run_experts
from polymoe.formats import FORMATS
from polymoe.layer.experts import FusedExperts
from polymoe.machine import DEVICES, Machine
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import FP8_TOKEN
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.numerics import relative_error
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Accepted, Rejected
from support.problems import plain_experts, problem_of, random_call, random_experts
from support.toys import LAYOUTS, choice, toys

H200 = Machine(DEVICES["h200"], {"torch": "2.11.0", "triton": "3.6.0", "toykernels": "1.0"})
MXFP4 = FORMATS["mxfp4"].encoding
PLAIN = Problem(
    spec=ExpertsSpec(hidden=4096, intermediate=2048, experts=8, gate=MXFP4, up=MXFP4, down=MXFP4),
    activation=SwiGLU(),
    top_k=2,
)
ALL: dict[str, Backend] = {**BACKENDS, **toys()}

FLIPPED: dict[str, Any] = {
    "activation": SwiGLU(limit=10.0), "top_k": 7, "weight_on": "input", "dtype": "fp16", "activations": FP8_TOKEN,
    "tp": 2, "ep": 2, "scales": ScaleRange(largest_exponent=26), "batch_invariant": True,
}  # fmt: skip
"""Another value of each field of a Problem."""

FLIPPED_SPEC: dict[str, Any] = {
    "hidden": 8192, "intermediate": 1024, "experts": 16, "up": FORMATS["nvfp4"].encoding,
    "down": FORMATS["bf16"].encoding, "gate": FORMATS["nvfp4"].encoding, "bias": True, "first_expert": 1,
    "local_experts": 3,
}  # fmt: skip
"""The same of its spec."""


def flipped(name: str) -> Problem:
    if name.startswith("spec."):
        name = name.removeprefix("spec.")
        local = {"local_experts": -1, "first_expert": 0} if name == "experts" else {"local_experts": 3}
        return replace(PLAIN, spec=replace(PLAIN.spec, **{**local, name: FLIPPED_SPEC[name]}))
    return replace(PLAIN, **{name: FLIPPED[name]})


NAMES = [*FLIPPED, *(f"spec.{name}" for name in FLIPPED_SPEC)]


def test_every_field_is_flipped() -> None:
    assert FLIPPED.keys() == {f.name for f in fields(Problem)} - {"spec"}
    assert FLIPPED_SPEC.keys() == {f.name for f in fields(ExpertsSpec)}


@pytest.mark.parametrize("field", NAMES)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_declared_is_rejected(name: str, field: str) -> None:
    """Or it is one of the fields that every check looks at."""
    backend, problem = ALL[name], flipped(field)
    without = {key: values for key, values in backend.handles.items() if key != field}
    told, silent = unhandled(backend.handles, problem), unhandled(without, problem)
    sizes = ("top_k", "spec.hidden", "spec.intermediate", "spec.experts", "spec.up", "spec.down", "spec.gate")
    if field in sizes:
        assert not silent
        return
    assert len(silent) > len(told) or told
    if told:
        verdict = judge(backend, problem, H200)
        assert isinstance(verdict, Rejected)
        assert {r.what for r in told} <= {r.what for r in verdict.reasons}


def test_an_unknown_activation_is_rejected_by_all() -> None:
    spec = replace(PLAIN.spec, gate=None)
    known = replace(PLAIN, spec=spec, activation=ReLU2())

    @dataclass(frozen=True, slots=True)
    class Cubed:
        gated = False
        name = "relu3"

    problem = replace(known, activation=Cubed())
    for name, backend in ALL.items():
        verdict = judge(backend, problem, H200)
        assert isinstance(verdict, Rejected)
        assert any(r.what == "activation" for r in verdict.reasons), name


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(Problem):
    """A Problem with a field that no backend has heard of."""

    adapters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WithNorm(ExpertsSpec):
    """The same for the spec."""

    norm: str = "none"


def as_kind(kind: type[Any], value: Any, **new: Any) -> Any:
    return kind(**{f.name: getattr(value, f.name) for f in fields(value)}, **new)


@pytest.mark.parametrize("name", ALL)
def test_a_field_added_later_is_rejected_until_it_is_declared(name: str) -> None:
    backend = ALL[name]
    before = judge(backend, PLAIN, H200)
    for plain, used in (
        (as_kind(Adapted, PLAIN), as_kind(Adapted, PLAIN, adapters=8)),
        tuple(replace(PLAIN, spec=as_kind(WithNorm, PLAIN.spec, norm=norm)) for norm in ("none", "rms")),
    ):
        assert judge(backend, plain, H200) == before
        verdict = judge(backend, used, H200)
        assert isinstance(verdict, Rejected)
        assert {str(r) for r in verdict.reasons} & {"adapters 8: not supported", "spec.norm rms: not supported"}
    chosen = select(as_kind(Adapted, PLAIN, adapters=8), H200, backends=ALL, layouts={**LAYOUTS})
    assert chosen.plan is None


@pytest.mark.parametrize("field", ["activation", "top_k", "weight_on", "dtype", "activations", "spec.bias"])
def test_what_the_reference_declares_it_computes(field: str) -> None:
    weights = random_experts("mxfp4", bias=field == "spec.bias")
    problem = problem_of(weights, **({field: FLIPPED[field]} if field in FLIPPED else {}))
    assert isinstance(judge(BACKENDS["reference"], problem, Machine.of("cpu")), Accepted)
    x, routing = random_call(6, 64, 5)
    experts = FusedExperts.pack(problem, weights, choice({"reference": BACKENDS["reference"]}))  # type: ignore[dict-item]
    expected = (
        run_experts(problem, weights, x, routing)
        if field == "activations"
        else plain_experts(weights, problem, x, routing)
    )
    assert relative_error(experts(x, *routing), expected) < 1e-6
