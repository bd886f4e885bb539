"""Peers beside the backends: rows of those that are right, wrong, absent or fail, and what each takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from side_by_side import side_by_side  # type: ignore
from torch import Tensor

from polymoe.backends.reference import run_experts
from polymoe.bench.cases import CASES, random_weights
from polymoe.bench.measure import BenchRow
from polymoe.bench.peers import PEERS, PeerCall, Stacks
from polymoe.errors import ArgumentError
from polymoe.problem import Problem
from polymoe.problem.routing import Routing
from polymoe.problem.verdict import Reason
from support.problems import random_experts
from support.tiny import CPU, TINY, bench

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Standin:
    """A peer whose results are the reference's, changed."""

    name: str
    change: Change = lambda y: y
    package: str = "torch"
    reasons: tuple[Reason, ...] = ()
    returns: bool = False
    compiles_at_once: bool = False

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        return self.reasons

    def prepare(self, problem: Problem, stacks: Stacks) -> PeerCall:
        weights = random_weights(problem, CPU)
        assert torch.equal(stacks.down["codes"][1], weights.expert(1).down.codes)
        both = [weights.expert(1).gate, weights.expert(1).up]
        assert torch.equal(stacks.gate_up["codes"][1], torch.cat([q.codes for q in both if q is not None]))

        def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> Tensor | None:
            assert ids_TA.dtype == torch.int32
            y_TH = self.change(run_experts(problem, weights, x_TH, Routing(ids_TA, weights_TA))).to(x_TH.dtype)
            if self.returns:
                return y_TH
            out_TH.copy_(y_TH)
            return None

        return call


def failing(tokens: int) -> Change:
    def change(y: Tensor) -> Tensor:
        if len(y) == tokens:
            raise RuntimeError("an illegal\n memory access")
        return y

    return change


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, list[BenchRow]]:
    peers = (
        Standin("right"), Standin("returning", returns=True), Standin("wrong", lambda y: 1.1 * y),
        Standin("silent", lambda y: torch.full_like(y, float("nan"))), Standin("failing", failing(9)),
        Standin("absent", package="no-such-package"), Standin("picky", reasons=(Reason("biases"),)),
    )  # fmt: skip
    monkeypatch.setattr("polymoe.bench.contenders.PEERS", {peer.name: peer for peer in peers})
    found: dict[str, list[BenchRow]] = {}
    for row in bench().rows((1, 9), ["reference"], peers=[peer.name for peer in peers]):
        found.setdefault(row.backend, []).append(row)
    return found


def test_rows(rows: Mapping[str, list[BenchRow]]) -> None:
    assert list(rows) == [
        "peer:absent", "peer:picky", "reference", "peer:right", "peer:returning", "peer:wrong", "peer:silent",
        "peer:failing",
    ]  # fmt: skip
    version = torch.__version__.split("+")[0]
    for name in ("right", "returning"):
        for row, tokens in zip(rows[f"peer:{name}"], (1, 9), strict=True):
            r = row.record
            assert r is not None
            assert (r.backend, r.peer, r.tokens) == (f"peer:{name}", name, tokens)
            assert r.version is not None
            assert r.version.startswith(version)
            assert r.error < 6e-3
            assert json.loads(json.dumps(asdict(r)))["peer"] == name
    for name in ("wrong", "silent"):
        assert [(row.wrong, row.record) for row in rows[f"peer:{name}"]] == [(True, None)] * 2
        assert all("WRONG, not timed" in row.note for row in rows[f"peer:{name}"])
    first, second = rows["peer:failing"]
    assert first.record is not None
    assert (second.tokens, second.record) == (9, None)
    assert second.note == "RuntimeError: an illegal memory access"
    assert second.version is not None
    assert [row.note for row in rows["peer:absent"]] == ["not installed (package no-such-package on PyPI)"]
    assert [row.note for row in rows["peer:picky"]] == ["biases: not supported"]
    assert rows["reference"][0].record is not None
    assert rows["reference"][0].record.peer is None


def test_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """By token count, after everything was called once; one scale per token where a peer has no other."""
    made: list[object] = []

    class Noting(Standin):
        def check(self, problem: Problem) -> tuple[Reason, ...]:
            return () if str(problem.activations) == "fp8_token" else (Reason("activations"),)

        def prepare(self, problem: Problem, stacks: Stacks) -> PeerCall:
            call = super().prepare(problem, stacks)

            def noting(x_TH: Tensor, *rest: Tensor) -> Tensor | None:
                made.append(len(x_TH))
                return call(x_TH, *rest)

            return noting

    class Unready(Standin):
        def prepare(self, problem: Problem, stacks: Stacks) -> PeerCall:
            raise RuntimeError("no kernel image")

    peers = (Noting("noting", compiles_at_once=True), Unready("unready"), Standin("failing", failing(9)))
    monkeypatch.setattr("polymoe.bench.contenders.PEERS", {peer.name: peer for peer in peers})
    run = bench(activations="fp8_group128", repeats=3)
    names = [peer.name for peer in peers]
    found = list(side_by_side(run, (1, 9), ["reference"], names, ready=lambda: made.append("ready")))
    assert made[:3] == [9, 1, "ready"]
    assert [(row.backend, row.tokens, row.record is None) for row in found] == [
        ("peer:unready", None, True),
        ("reference", 1, False), ("peer:noting", 1, False), ("peer:failing", 1, False),
        ("reference", 9, False), ("peer:noting", 9, False), ("peer:failing", 9, True),
    ]  # fmt: skip
    modes = {row.backend: row.record.activations for row in found if row.record is not None}
    assert modes == {"reference": "fp8_group128", "peer:noting": "fp8_token", "peer:failing": "fp8_group128"}


def test_an_unknown_peer() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'humming'"):
        list(bench().rows((1,), ["reference"], peers=["huming"]))


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("deepseek-v4-flash", {"humming", "vllm", "flashinfer"}),
        ("gpt-oss-20b", {"triton_kernels"}),
        ("kimi-k2-tp8", {"humming", "vllm"}),
        ("glm-4.7", {"humming", "vllm"}),
        ("deepseek-v3-tp8", {"humming", "vllm", "deepgemm", "finegrained"}),
        ("qwen3-235b-tp4-bf16", {"vllm", "quack"}),
        ("nemotron-3-super", set()),  # without a gate
    ],
)
def test_which_peers_take_a_case(case: str, names: set[str]) -> None:
    problem = CASES[case].problem()
    assert {name for name, peer in PEERS.items() if not peer.check(problem)} == names
    rank = replace(problem, spec=replace(problem.spec, local_experts=2), ep=2)
    assert not [name for name, peer in PEERS.items() if not peer.check(rank)]


def test_one_shape_has_a_kernel_of_its_own() -> None:
    case = CASES["qwen3-235b"].changed(hidden=2048, intermediate=512, experts=256)
    assert not PEERS["monomoe"].check(case.problem("fp8_block128"))
    (reason,) = PEERS["monomoe"].check(case.changed(experts=128).problem("fp8_block128"))
    assert str(reason) == "sizes: expects H 2048, F 512, E 256, got H 2048, F 512, E 128"
    (reason,) = PEERS["monomoe"].check(case.changed(top_k=10).problem("fp8_block128"))
    assert str(reason) == "experts of a token: expects at most 8, got 10"


def test_two_global_scales_are_not_given_to_peers() -> None:
    with pytest.raises(ArgumentError, match="one global scale for gate and up"):
        Stacks.of(random_experts("nvfp4", hidden=64, intermediate=32), CPU)
    stacks = Stacks.of(random_weights(TINY.problem("nvfp4"), CPU), CPU)
    assert stacks.gate_up["global_scale"].shape == (TINY.experts,)


def test_nothing_of_theirs_is_imported() -> None:
    code = "import sys, polymoe.bench.peers, polymoe.backends; print([m for m in sys.modules if m in %r])"
    names = ["humming", "vllm", "flashinfer", "quack", "triton_kernels", "triton"]
    done = subprocess.run([sys.executable, "-c", code % names], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
