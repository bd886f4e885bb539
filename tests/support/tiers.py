"""A pytest plugin: which of the slow tests a run includes (``--slow``): none, a sample, or all.

A sample has some tests of each group: of each test function, whatever its parameters. A test that is alone in its group
is in every fourth sample. A seed chooses them: the commit's hash, so that every commit tests others and all runs of one
commit the same. ``POLYMOE_TEST_SEED`` sets it, to repeat a run of another commit. Tests marked ``long`` are in no
sample.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

SEED = "POLYMOE_TEST_SEED"
SAMPLED_ALONE = 1 / 4
SAMPLED_OF_A_GROUP = 1 / 16
"""At least one test of each group of several, whatever the share comes to, and as many as ``slow(sample=12)`` says."""


def sample(tests: Mapping[str, int], seed: str) -> set[str]:
    """The node IDs chosen from ``tests``, which say how many of their group are wanted at least: of each group the same
    ones whatever else is collected."""
    groups: dict[str, list[str]] = {}
    for test in tests:
        groups.setdefault(test.partition("[")[0], []).append(test)
    chosen: set[str] = set()
    for name, members in groups.items():
        count = max(math.ceil(len(members) * SAMPLED_OF_A_GROUP), min(tests[members[0]], len(members)))
        draw = random.Random(f"{seed} {name}")
        if len(members) > 1 or draw.random() < SAMPLED_ALONE:
            chosen.update(draw.sample(sorted(members), count))
    return chosen


def default_seed(directory: Path) -> str:
    """The hash of the commit that is checked out, or the date where there is no repository."""
    git = ["git", "-C", str(directory), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return time.strftime("%Y-%m-%d", time.gmtime())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", choices=("none", "sample", "all"), default="all", help="which of the tests marked slow or long to run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow") == "sample":
        os.environ.setdefault(SEED, default_seed(config.rootpath))  # workers inherit it, so that all choose the same


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which = config.getoption("--slow")
    if which == "all":
        return
    slow = {item for item in items if "slow" in item.keywords or "long" in item.keywords}
    if which == "sample":
        short = (item for item in slow if "long" not in item.keywords)
        chosen = sample({item.nodeid: _least(item) for item in short}, os.environ[SEED])
        slow = {item for item in slow if item.nodeid not in chosen}
    config.hook.pytest_deselected(items=[item for item in items if item in slow])
    items[:] = [item for item in items if item not in slow]


def _least(item: pytest.Item) -> int:
    marker = item.get_closest_marker("slow")
    return marker.kwargs.get("sample", 1) if marker else 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--slow") == "sample":
        seed = os.environ[SEED]
        terminalreporter.line(f"slow tests: a sample with seed {seed}; to repeat it: {SEED}={seed} scripts/test --ci")
