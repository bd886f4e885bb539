"""Selection's promises, proven with the toy backends."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from polymoe.errors import ArgumentError, PlanError, UnsupportedProblem, VerificationError
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activation_quantization import FP8_TOKEN
from polymoe.problem.activations import SwiGLU
from polymoe.problem.numerics import relative_error
from polymoe.problem.verdict import Accepted, Reason, Rejected
from support.problems import plain_experts, problem_of, random_call, random_experts
from support.toys import LAYOUTS, TileConfig, Toy, choice, toys


def test_backends_that_share_a_layout_split_the_token_range() -> None:
    weights = random_experts()
    backends = toys()
    experts = FusedExperts.pack(problem_of(weights), weights, choice(backends), check=False)
    plan = experts.explain().require()
    assert plan.layout == "flipped"
    assert [(tokens, step.backend) for tokens, step in plan.ranges()] == [
        ("1-63", "small"),
        ("64-512", "large"),
        ("513+", "large"),
    ]
    for tokens in (1, 63, 64, 700):
        x, routing = random_call(tokens, 64, 5)
        y = experts(x, *routing)
        assert relative_error(y, plain_experts(weights, experts.problem, x, routing)) < 1e-5
    assert (backends["small"].calls, backends["large"].calls) == ([1, 63], [64, 700])


def test_every_reason_is_reported_not_the_first() -> None:
    weights = random_experts()
    selection = choice(toys()).select(problem_of(weights))
    absent = next(c for c in selection.candidates if c.backend == "absent")
    assert isinstance(absent.verdict, Rejected)
    assert [(r.what, r.expected, r.got) for r in absent.verdict.reasons] == [
        ("package toykernels", "any version", "not installed"),
        ("H", "a multiple of 4096", "64"),
    ]
    text = str(selection)
    assert "package toykernels: expects any version, got not installed" in text
    assert "H: expects a multiple of 4096, got 64" in text


def test_a_layout_that_cannot_hold_the_experts_rejects_its_backends_with_its_reasons() -> None:
    class Wide(type(LAYOUTS["flipped"])):  # type: ignore[misc]
        def check(self, spec, scales=None):  # type: ignore[no-untyped-def]
            return (Reason("H", "a multiple of 128", str(spec.hidden)),)

    weights = random_experts()
    picky = replace(choice(toys(Toy("either", layouts=("flipped", "natural")))), layouts={**LAYOUTS, "flipped": Wide()})
    selection = picky.select(problem_of(weights))
    verdicts = {c.backend: c.verdict for c in selection.candidates}
    assert verdicts["small"] == Rejected((Reason("layout flipped, H", "a multiple of 128", "64"),))
    assert isinstance(verdicts["either"], Accepted)
    assert selection.require().layout == "natural"
    assert {step.backend for step in selection.require().steps} == {"either"}


def test_a_verdict_may_name_the_layouts_that_serve_the_problem() -> None:
    """A layout that could hold the experts is not taken for a problem that its kernels do not compute."""

    class Picky(Toy):
        def check(self, problem, machine):  # type: ignore[no-untyped-def]
            layouts = ("natural",) if problem.activations.quantized else None
            return Accepted(layouts=layouts)

    problem = problem_of(random_experts())
    table = choice(
        {
            "picky": Picky(
                "picky", layouts=("flipped", "natural"), handles={"activation": (SwiGLU,), "activations": (FP8_TOKEN,)}
            )
        }
    )
    rounded = replace(problem, activations="fp8_token")
    assert [table.select(p).require().layout for p in (problem, rounded)] == ["flipped", "natural"]
    assert [table.select(p).candidates[0].layouts for p in (problem, rounded)] == [("flipped", "natural"), ("natural",)]
    assert table.select(rounded, "flipped").plan is None

    class Narrow(type(LAYOUTS["natural"])):  # type: ignore[misc]
        def check(self, spec, scales=None):  # type: ignore[no-untyped-def]
            return (Reason("H", "at most 32", str(spec.hidden)),)

    table = replace(table, layouts={**LAYOUTS, "natural": Narrow()})
    assert table.select(problem).require().layout == "flipped"
    assert table.select(rounded).candidates[0].verdict == Rejected((Reason("layout natural, H", "at most 32", "64"),))


def test_the_reasons_of_the_layout_that_lacks_least() -> None:
    def lacking(*what: str):  # type: ignore[no-untyped-def]
        class Lacking(type(LAYOUTS["flipped"])):  # type: ignore[misc]
            def check(self, spec, scales=None):  # type: ignore[no-untyped-def]
                return tuple(Reason(w, "another", "this") for w in what)

        return Lacking()

    table = choice({"either": Toy("either", layouts=("flipped", "natural"))})
    table = replace(table, layouts={"flipped": lacking("H", "F"), "natural": lacking("experts")})
    verdict = table.select(problem_of(random_experts())).candidates[0].verdict
    assert verdict == Rejected((Reason("layout natural, experts", "another", "this"),))


def test_packed_in_a_layout_that_nothing_here_reads() -> None:
    """As after ``.to("cpu")``: what runs here says which layout it reads, and is not recommended."""
    table = choice({"other": Toy("other", layouts=("natural",))})
    message = r"other: packed layout: expects natural, got flipped\n  hint: load them again on cpu"
    with pytest.raises(UnsupportedProblem, match=message):
        table.select(problem_of(random_experts()), "flipped").require()
    assert table.select(problem_of(random_experts()), "natural").plan is not None


def test_one_copy_of_the_weights() -> None:
    weights = random_experts(bias=True)
    experts = FusedExperts.pack(problem_of(weights), weights, choice(toys()))
    held = sum(b.numel() * b.element_size() for b in experts.buffers())
    assert held == experts.packed.nbytes == sum(x.nbytes for x in weights)
    assert experts.state_dict() == {}
    for got, expected in zip(experts.weights, weights, strict=True):
        for name, tensor in expected.projections.items():
            for part, value in tensor.parts().items():
                assert torch.equal(got.projections[name].parts()[part].view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("backend", ["absent"])
def test_a_named_backend_that_is_rejected_raises_with_its_reasons(backend: str) -> None:
    weights = random_experts()
    with pytest.raises(UnsupportedProblem) as error:
        FusedExperts.pack(problem_of(weights), weights, choice(toys(), backend), where="layer 7")
    text = str(error.value)
    assert "layer 7" in text
    assert "backend 'absent'" in text
    assert "toykernels" in text
    assert "multiple of 4096" in text
    assert 'backend="small"' in text
    assert isinstance(error.value, NotImplementedError)


def test_a_named_backend_is_never_replaced() -> None:
    weights = random_experts()
    backends = toys()
    experts = FusedExperts.pack(problem_of(weights), weights, choice(backends, "small"), check=False)
    experts(*_flat(random_call(63, 64, 5)))
    with pytest.raises(PlanError, match=r"at most 63 \(backend small\)"):
        experts(*_flat(random_call(64, 64, 5)))
    assert backends["large"].calls == []


def test_auto_needs_a_layout_that_takes_any_number_of_tokens() -> None:
    weights = random_experts()
    only_small = {"small": toys()["small"]}
    selection = choice(only_small).select(problem_of(weights))
    assert selection.plan is None
    with pytest.raises(UnsupportedProblem, match="up to 63 tokens"):
        selection.require()


def test_unknown_backend_names_the_nearest() -> None:
    weights = random_experts()
    with pytest.raises(ArgumentError, match="did you mean 'small'"):
        choice(toys(), "smal").select(problem_of(weights))


def test_the_layout_with_the_least_mean_over_the_role_wins() -> None:
    """``decoder`` is best to 256 tokens and hopeless above: decode takes its layout, prefill the other one."""
    weights = random_experts()
    problem = problem_of(weights)

    class Decoder(Toy):
        def predict(self, problem, machine, tokens):  # type: ignore[no-untyped-def]
            times = 1.1 if tokens <= 256 else 40.0
            return type(super().predict(problem, machine, tokens))(
                times * super().predict(problem, machine, tokens).time_us / self.times_floor, "measured"
            )

    table = {**toys(), "decoder": Decoder("decoder", layouts=("natural",))}
    chosen = {
        role: choice(table, role=role).select(problem).require().layout for role in ("decode", "prefill", "mixed")
    }
    assert chosen == {"decode": "natural", "prefill": "flipped", "mixed": "flipped"}


def test_an_exception_inside_a_check_surfaces() -> None:
    class Broken(Toy):
        def check(self, problem, machine):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("a bug in a check")

    weights = random_experts()
    with pytest.raises(ZeroDivisionError):
        choice({**toys(), "broken": Broken("broken")}).select(problem_of(weights))


def test_a_backend_that_computes_something_else_is_refused_at_load() -> None:
    weights = random_experts()
    wrong = {"wrong": Toy("wrong", error=0.02)}
    with pytest.raises(VerificationError) as error:
        FusedExperts.pack(problem_of(weights), weights, choice(wrong), where="layer 3")
    assert "layer 3" in str(error.value)
    assert "'wrong'" in str(error.value)
    assert 0.019 < float(error.value.got or "nan") < 0.021
    FusedExperts.pack(problem_of(weights), weights, choice(wrong), check=False)


def test_the_load_check_runs_every_backend_of_the_plan() -> None:
    weights = random_experts()
    backends = {**toys(), "large": Toy("large", times_floor=3.0, error=0.5)}
    with pytest.raises(VerificationError, match="'large'"):
        FusedExperts.pack(problem_of(weights), weights, choice(backends))
    assert backends["small"].calls == [8]


def test_the_load_check_takes_as_many_tokens_as_a_configuration_wants() -> None:
    class Many(TileConfig):
        @property
        def check_tokens(self) -> int:
            return 8 if self.tile == 16 else 100

    class Steps(Toy):
        def configure(self, problem, machine, tokens):  # type: ignore[no-untyped-def]
            return Many(super().configure(problem, machine, tokens).tile)  # type: ignore[attr-defined]

    weights = random_experts()
    backends = {**toys(), "large": Steps("large", times_floor=3.0)}
    FusedExperts.pack(problem_of(weights), weights, choice(backends))
    assert (backends["small"].calls, backends["large"].calls) == ([8], [8, 100])


def test_the_load_check_compares_with_the_checkpoint_and_not_with_itself() -> None:
    """A layout that loses something is caught although its own round trip agrees with itself."""

    class Lossy(type(LAYOUTS["flipped"])):  # type: ignore[misc]
        def pack(self, weights, device, out=None):  # type: ignore[no-untyped-def]
            packed = super().pack(weights, device, out)
            packed.tensors["up.codes"].bitwise_and_(0x77)  # every sign lost
            return packed

    weights = random_experts()
    lossy = choice(toys())
    lossy = type(lossy)(lossy.machine, "mixed", "auto", lossy.backends, {"flipped": Lossy()})
    with pytest.raises(VerificationError, match=r"expert 0 up\.codes: expected to be packed in layout 'flipped'"):
        FusedExperts.pack(problem_of(weights), weights, lossy)
    packed = FusedExperts.pack(problem_of(weights), weights, lossy, check=False)
    with pytest.raises(VerificationError, match="'small'"):
        packed.check(weights)


def test_selection_as_json_has_verdicts_predictions_and_plan() -> None:
    weights = random_experts()
    found = choice(toys(), device="h200").select(problem_of(weights)).to_dict()
    assert [c["backend"] for c in found["candidates"]] == ["small", "large", "absent"]
    assert [c["accepted"] for c in found["candidates"]] == [True, True, False]
    assert found["candidates"][2]["reasons"][0]["what"] == "package toykernels"
    assert [p["tokens"] for p in found["candidates"][0]["predicted"]] == [1, 2, 4, 8, 16, 32]
    steps = found["plan"]["steps"]
    times = [step.pop("times") for step in steps]
    assert steps[0] == {
        "tokens": "1-63", "max_tokens": 63, "backend": "small", "family": "", "config": "tile=16", "proof": "unrun",
    }  # fmt: skip
    assert [[t["tokens"] for t in of_step] for of_step in times] == [
        [1, 2, 4, 8, 16, 32, 63], [64, 128, 256, 512], [513, 1024, 2048, 4096, 8192, 16384],
    ]  # fmt: skip
    assert times[0][0] == {k: found["candidates"][0]["predicted"][0][k] for k in ("tokens", "time_us", "source")}
    assert found["device"] == {"name": "h200", "arch": "sm_90", "rates": "measured"}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_every_range_has_a_time(role: str) -> None:
    """Also those in which the role has no token count."""
    weights = random_experts()
    selection = choice(toys(), role=role, device="h200").select(problem_of(weights))
    found = selection.ranges()
    assert [r.tokens for r in found] == ["1-63", "64-512", "513+"]
    assert all(re.match(r"[\d.]+ us at \d+", r.time) for r in found)
    assert {(r.source, r.proven) for r in found} == {("predicted", "never tested on h200")}


def _flat(call):  # type: ignore[no-untyped-def]
    x, routing = call
    return x, *routing
