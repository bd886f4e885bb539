"""Measured times: what a problem's key holds, which row counts."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from polymoe.common.json_input import read_fields
from polymoe.errors import FormatError
from polymoe.formats import FORMATS, Encoding, PerGroup
from polymoe.planning.measured import Measured, Table, newest, problem_key
from polymoe.problem import Problem
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec
from support.table_rows import row

MXFP4, INT4 = FORMATS["mxfp4"].encoding, FORMATS["int4_g32"].encoding
SPEC = ExpertsSpec(hidden=256, intermediate=128, experts=8, gate=MXFP4, up=MXFP4, down=MXFP4)
PROBLEM = Problem(spec=SPEC, activation=SwiGLU(), top_k=2)

# Each field changed; None stands for what may differ without another key.
SPECS = {
    "hidden": 512, "intermediate": 256, "experts": 16, "gate": INT4, "up": INT4, "down": INT4, "bias": True,
    "local_experts": 4, "first_expert": None,
}  # fmt: skip
PROBLEMS = {
    "activation": SwiGLU(limit=10.0), "top_k": 4, "weight_on": "input", "activations": "fp8_token",
    "scales": ScaleRange(largest_exponent=26), "batch_invariant": True, "dtype": None, "tp": None, "ep": None,
}  # fmt: skip


def test_every_field_that_matters_is_in_the_key() -> None:
    assert {f.name for f in fields(Problem)} == {*PROBLEMS, "spec"}
    assert {f.name for f in fields(ExpertsSpec)} == {*SPECS}
    changed = [replace(PROBLEM, **{n: v}) for n, v in PROBLEMS.items() if v is not None]
    changed += [replace(PROBLEM, spec=replace(SPEC, **{n: v})) for n, v in SPECS.items() if v is not None]
    keys = [problem_key(p) for p in (PROBLEM, *changed)]
    assert len(set(keys)) == len(keys)


def test_every_field_of_an_encoding_is_in_the_key() -> None:
    group = PerGroup(1, 32)
    encodings = [
        Encoding(element="bf16"),
        Encoding(element="fp16"),
        Encoding(element="int4", granularity=group, scale_dtype="bfloat16"),
        Encoding(element="int4", granularity=group, scale_dtype="float16"),
        Encoding(element="int4", granularity=PerGroup(1, 64), scale_dtype="float16"),
        Encoding(element="int4", granularity=group, scale_dtype="float16", zero_points=True),
        Encoding(element="e2m1", granularity=group, scale_dtype="e4m3"),
        Encoding(element="e2m1", granularity=group, scale_dtype="e4m3", global_scale=True),
    ]
    keys = {problem_key(replace(PROBLEM, spec=replace(SPEC, down=e))) for e in encodings}
    assert len(keys) == len(encodings)


def test_what_does_not_matter_is_not() -> None:
    rank = replace(SPEC, local_experts=4)
    assert problem_key(replace(PROBLEM, dtype="fp32", tp=8, ep=2)) == problem_key(PROBLEM)
    assert problem_key(replace(PROBLEM, spec=rank)) == problem_key(replace(PROBLEM, spec=replace(rank, first_expert=4)))
    assert problem_key(replace(PROBLEM, activation=GeGLU())) != problem_key(PROBLEM)


def test_a_key_is_the_same_in_every_process() -> None:
    """Of which each has other hashes."""
    assert problem_key(PROBLEM) == (
        "H=256 F=128 E=8/8 A=2, gate e2m1 group 1x32 e8m0, up e2m1 group 1x32 e8m0, down e2m1 group 1x32 e8m0, swiglu, "
        "16bit activations"
    )


def test_rows_there_and_back_through_json() -> None:
    assert read_fields(Measured, json.loads(json.dumps(row(4).to_dict()))) == row(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens: expected a whole number from 1 to 16777216"),
        ({"median_us": float("nan")}, "median_us"),
        ({"median_us": "9"}, "median_us"),
        ({"config": []}, "config: expected dict"),
        ({"triton": 3.6}, "triton: expected str or NoneType"),
        ({"extra": 1}, "extra: expected a field of Measured"),
    ],
)
def test_a_row_that_is_none_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_fields(Measured, {**row().to_dict(), **change})


class TestPoints:
    KEY = problem_key(PROBLEM)

    def mine(self, tokens: int, time: float, **changes: object) -> Measured:
        return row(tokens, time, problem=self.KEY, **changes)

    def times(self, *sources: tuple[Measured, ...], triton: str | None = "3.6.1") -> list[tuple[int, float]]:
        return [(r.tokens, r.median_us) for r in Table(sources).points("h200", "toy", PROBLEM, triton)]

    def test_only_the_device_the_backend_and_the_problem_asked_for(self) -> None:
        rows = (
            self.mine(64, 2.0), self.mine(1, 1.0), self.mine(2, 9.0, device="b200"), self.mine(2, 9.0, backend="other"),
            row(2, 9.0),
        )  # fmt: skip
        assert self.times(rows) == [(1, 1.0), (64, 2.0)]

    def test_the_users_go_before_shipped_ones_and_new_before_old(self) -> None:
        shipped = (self.mine(1, 5.0, date="2027"), self.mine(2, 6.0))
        own = (self.mine(1, 1.0, date="2026-02"), self.mine(1, 2.0, date="2026-01"))
        assert self.times(own, shipped) == [(1, 1.0), (2, 6.0)]

    def test_rows_of_this_triton_go_before_others(self) -> None:
        own, shipped = (self.mine(1, 1.0, triton="3.5.0"),), (self.mine(1, 5.0),)
        assert self.times(own, shipped) == [(1, 5.0)]
        assert self.times(own) == [(1, 1.0)]
        assert self.times(own, shipped, triton="3.5.2") == [(1, 1.0)]


def test_the_newest_row_of_a_key() -> None:
    old, new, other = row(1, 1.0, date="a"), row(1, 2.0, date="b"), row(1, 3.0, triton="3.7.0", date="a")
    assert newest([new, other, old]) == [new, other]
