"""Which slow tests ``scripts/test`` and ``scripts/test --ci`` include."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import tiers

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("n", range(30))
def test_many(n):
    pass

@pytest.mark.slow(sample=12)
@pytest.mark.parametrize("n", range(20))
def test_dozen(n):
    pass

@pytest.mark.slow
def test_one():
    pass

@pytest.mark.long
def test_of_minutes():
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test suite with one quick test, two groups of slow ones and one that takes minutes."""
    monkeypatch.delenv(tiers.SEED, raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each run would import the installed ones anew: seconds
    pytester.makeini("[pytest]\nmarkers =\n    slow:\n    long:\n")
    pytester.makepyfile(test_suite=TESTS)
    return pytester


def collected(suite: pytest.Pytester, *arguments: str) -> list[str]:
    result = suite.runpytest_inprocess("-p", "support.tiers", "--collect-only", "-q", *arguments)
    assert result.ret == 0
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_a_sample_has_some_of_each_group_and_nothing_long(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, alone = [], list[bool]()
    for seed in map(str, range(8)):
        monkeypatch.setenv(tiers.SEED, seed)
        found = collected(suite, "--slow=sample")
        assert found == collected(suite, "--slow=sample")
        assert found[0] == "test_quick"
        assert "test_of_minutes" not in found
        many = [name for name in found if name.startswith("test_many[")]
        assert len(many) == 2  # a sixteenth of 30, rounded up
        assert sum(name.startswith("test_dozen[") for name in found) == 12
        alone.append("test_one" in found)
        assert len(set(found)) == len(found) == 1 + 2 + 12 + alone[-1]
        samples += many
    assert len(set(samples)) > 8  # of 16 drawn from 30
    assert set(alone) == {True, False}


def test_workers_choose_the_same_sample_and_the_seed_is_said(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    arguments = ["-p", "support.tiers", "--slow=sample"]
    result = suite.runpytest_subprocess(*arguments, "-p", "xdist.plugin", "-n", "2")
    assert result.parseoutcomes()["passed"] in (15, 16)
    (said,) = [line for line in result.outlines if "slow tests: a sample with seed" in line]
    assert f"{tiers.SEED}={tiers.default_seed(suite.path)} scripts/test --ci" in said
    monkeypatch.setenv(tiers.SEED, "mine")
    assert f"{tiers.SEED}=mine scripts/test --ci" in suite.runpytest_inprocess(*arguments).stdout.str()


def test_tests_that_need_a_gpu_are_all_in_one_place() -> None:
    """tests/conftest.py marks them."""
    here = Path(__file__).parent
    marked = [path for path in here.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    assert marked == [Path(__file__)]
