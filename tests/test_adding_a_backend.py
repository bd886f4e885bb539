"""docs/adding-a-backend.md is true: its example runs, and it names the protocol's methods and the files there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polymoe.backends.base import UNTIMED, Backend, judge
from polymoe.bench.cases import CASES
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.verdict import Accepted, Rejected
from support.problems import plain_experts, problem_of, random_call, random_experts

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/adding-a-backend.md").read_text(encoding="utf-8")


(CODE,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def dense() -> Iterator[Any]:
    module: Any = ModuleType("polymoe_example")
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    exec(compile(CODE, "docs/adding-a-backend.md", "exec", dont_inherit=True), vars(module))
    yield module.Dense()
    del sys.modules[module.__name__]


def methods() -> set[str]:
    return {name for name in vars(Backend) if not name.startswith("_")} - {"name", "layouts", "handles"}


def test_every_method_has_its_row(dense: Any) -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == methods() | {"run"}
    assert methods() <= set(dir(dense))


@pytest.mark.parametrize("tokens", [1, 17, 100])
def test_the_example_is_right(dense: Any, tokens: int) -> None:
    weights = random_experts(bias=True)
    choice = PlanRequest(Machine.of("cpu"), "mixed", "dense", {"dense": dense}, LAYOUTS)
    experts = FusedExperts.pack(problem_of(weights), weights, choice)
    x, routing = random_call(tokens, 64, 5)
    expected = plain_experts(weights, experts.problem, x, routing)
    assert relative_error(experts(x, *routing), expected) < TOLERANCE
    routing.topk_ids_TA[0] = -1
    assert not experts(x, *routing)[0].any()


def test_the_example_says_what_it_takes(dense: Any) -> None:
    problem, machine = CASES["gpt-oss-20b"].problem(), Machine.of("h200")
    assert dense.check(problem, machine) == Accepted(max_tokens=256, opt_in_reason=UNTIMED)
    quantized = CASES["gpt-oss-20b"].problem(activations="fp8_token")
    assert isinstance(judge(dense, quantized, machine), Rejected)
    (candidate,) = select(problem, machine, backends={"dense": dense}, backend="dense").candidates
    assert all(prediction.time_us > 0 for _, prediction in candidate.predictions)
    for tokens in (1, 100):
        found = dense.tuning_configs(problem, machine, tokens)
        assert found == (dense.configure(problem, machine, tokens),)
        assert not dense.tuning_configs(problem, machine, tokens, [(config, 1.0) for config in found])


def test_linked_and_named_files_exist() -> None:
    for name in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / name).exists(), name
    for name in re.findall(r"`((?:tests|benchmarks|src|scripts)/[\w./-]+)`", TEXT):
        assert "NAME" in name or (ROOT / name).exists(), name


AFFECTED = (
    "tests/contract", "tests/doctor", "tests/planning", "tests/bench/test_measure.py", "tests/common",
    "tests/explanation/test_explanation.py", "tests/cli/test_cli.py", "tests/layer/test_experts.py",
    "tests/verify/test_verify.py", "tests/test_imports.py", "tests/test_written_docs.py",
    "tests/backends/test_flashinfer.py",
)  # fmt: skip
"""What speaks of all backends."""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_guide_leaves_checks_and_tests_green(tmp_path: Path) -> None:
    """Its steps word for word, in a copy: a file with the example, a row in ``_OURS``, the generated documents."""
    parts = ("src", "tests", "benchmarks", "docs", "scripts", "constraints", "examples", "models", ".github", ".ci")
    for name in parts:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*.*"):
        if file.is_file():
            shutil.copy(file, tmp_path)
    (tmp_path / "src/polymoe/backends/dense.py").write_text(CODE, encoding="utf-8")
    table = tmp_path / "src/polymoe/backends/__init__.py"
    text = table.read_text(encoding="utf-8").replace("FlashInfer())\n", "FlashInfer(), Dense())\n")
    before = "from polymoe.backends.flashinfer import"
    table.write_text(text.replace(before, f"from polymoe.backends.dense import Dense\n{before}"), encoding="utf-8")

    def run(*command: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-1000:]}"

    run("ruff", "check", "src")
    run("ruff", "format", "--check", "src")
    run(sys.executable, "benchmarks/write_docs.py")
    assert "## dense" in (tmp_path / "docs/backends.md").read_text(encoding="utf-8")
    assert (tmp_path / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()  # auto has not changed
    run(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--slow", "none", *AFFECTED)
