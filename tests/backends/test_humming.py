"""The backend ``humming``: verdicts, when ``auto`` takes it, and its calls on a stand-in for the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polymoe.backends.humming import Humming, HummingConfig
from polymoe.backends.judge import judge
from polymoe.bench.cases import CASES
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Measured, Table, problem_key
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.problem.verdict import Accepted, Rejected

PACKAGES = {"torch": "2.11.0", "triton": "3.6.0", "humming-kernels": "0.1.19"}
H200 = Machine(DEVICES["h200"], PACKAGES)
ROOT = Path(__file__).parent.parent.parent


NATIVE = "humming_a16_native"


def problem(case: str = "kimi-k2-tp8", **changes: Any) -> Problem:
    return replace(CASES[case].problem(), **changes)


@pytest.mark.parametrize("case", ["kimi-k2-tp8", "deepseek-v4-flash", "nemotron-3-super"])
def test_named_cases(case: str) -> None:
    for gpu, layout in {"h200": "humming_a16", "b200": NATIVE, "rtx5090": NATIVE, "gb10": NATIVE}.items():
        verdict = judge(Humming(), problem(case), Machine(DEVICES[gpu], PACKAGES))
        compiler = layout == NATIVE and case != "kimi-k2-tp8"
        notes = ("needs Humming to compile with CUDA 13.2 or newer",) if compiler else ()
        assert verdict == Accepted(capturable=True, foreign=True, layouts=(layout,), notes=notes)


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({"triton": "3.6.0"}, "package humming-kernels: expects 0.1.19 or newer, got not installed"),
        ({**PACKAGES, "humming-kernels": "0.1.10"}, "package humming-kernels: expects 0.1.19 or newer, got 0.1.10"),
        ({**PACKAGES, "triton": "3.5.1"}, "triton: expects 3.6 or newer, got 3.5.1"),
    ],
)
def test_packages(packages: dict[str, str], reason: str) -> None:
    verdict = judge(Humming(), problem(), Machine(DEVICES["h200"], packages))
    assert isinstance(verdict, Rejected)
    assert [str(r) for r in verdict.reasons] == [reason]


def test_versions_that_give_wrong_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymoe.backends.humming.backend._WRONG", {"0.1.20": "sums rows twice"})
    machine = Machine(DEVICES["h200"], {**PACKAGES, "humming-kernels": "0.1.20"})
    verdict = judge(Humming(), problem(), machine)
    assert isinstance(verdict, Rejected)
    assert [str(r) for r in verdict.reasons] == [
        "package humming-kernels: expects another version, got 0.1.20, which sums rows twice"
    ]
    for version in ("0.1.21", "0.2.0", "0.1.19.post1"):
        packages = {**PACKAGES, "humming-kernels": version}
        assert isinstance(judge(Humming(), problem(), Machine(DEVICES["h200"], packages)), Accepted)


def test_gpus_and_activations() -> None:
    def accepted(gpu: str, case: str, activations: str | None = None) -> bool:
        p = CASES[case].problem(None, activations)
        return isinstance(judge(Humming(), p, Machine(DEVICES[gpu], PACKAGES)), Accepted)

    assert all(accepted(gpu, "kimi-k2") for gpu in ("a100", "rtx3090", "l40s", "h100", "h200", "b200", "rtx5090"))
    assert not accepted("cpu", "kimi-k2")
    assert accepted("a100", "deepseek-v3", "16bit")
    assert not accepted("h200", "deepseek-v3")


def test_auto_takes_it_where_this_machine_measured_it_faster() -> None:
    p = problem()

    def row(tokens: int, us: float) -> Measured:
        return Measured(
            device="h200", backend="humming", problem=problem_key(p), tokens=tokens,
            config=HummingConfig(tokens).to_dict(), median_us=us, torch="2.11.0", triton="3.6.0", driver="13.0",
            polymoe="0", date="2026-01-01T00:00:00Z", command="tune",
        )  # fmt: skip

    def taken(mine: list[Measured], shipped: list[Measured]) -> set[str]:
        plan = select(p, H200, table=Table((mine, shipped))).plan
        assert plan is not None
        return {step.backend for step in plan.steps}

    every = [row(4**n, 1.0 + n) for n in range(8)]
    assert taken(every, []) == {"humming"}
    assert "humming" not in taken([replace(r, median_us=1e6) for r in every], [])
    assert "humming" not in taken([], every)  # not measured on this machine
    assert "humming" not in taken(every[2:], [])  # calls of few tokens were not measured


def test_configurations() -> None:
    p = problem()
    assert Humming().tuning_configs(p, H200, 64) == (HummingConfig(), HummingConfig(256), HummingConfig(1024))
    assert Humming().tuning_configs(p, H200, 64, timed=[(HummingConfig(), 1.0)]) == ()
    assert HummingConfig.from_dict(HummingConfig(8).to_dict()) == HummingConfig(8)
    assert Humming().predict(p, H200, 64).time_us > Humming().predict(p, H200, 1).time_us > 0


CALLS: dict[str, dict[str, Any]] = {
    **{f: {"format": f} for f in ("mxfp4", "nvfp4", "int4_g32", "fp8_block128", "fp8_tensor")},
    **{f"{f}, native": {"format": f, "layout": NATIVE} for f in ("mxfp4", "int4_g32", "fp8_block128")},
    "one token": {"tokens": 1},
    "no gate": {"gated": False, "format": "nvfp4"},
    "ids of others, another tile for down": {"tokens": 40, "others": True, "rank": [1, 3]},
    "float32": {"dtype": "float32"},
    "x is a view at an odd offset": {"view": True},
    "wrong": {"wrong": True},
    "another order": {"layout": NATIVE, "native": False},
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """The calls on the stand-in, in Triton's interpreter, which needs a process of its own."""
    pytest.importorskip("triton")
    code = str(ROOT / "tests" / "support" / "humming_interpreted.py")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, code], input="\n".join(json.dumps(case) for case in CALLS.values()), text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": paths}, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CALLS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_a_stand_in(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    if name == "another order":
        assert "expected kernels that read the order of columns, got" in result["exception"]
        assert "CUDA 13.2 or newer" in result["exception"]
        return
    assert "exception" not in result, result.get("exception")
    if name == "wrong":
        assert result["error"] > 0.1  # what the check at load refuses
    else:  # the interpreter truncates to bfloat16, which a GPU rounds to
        assert result["error"] < 9e-3
