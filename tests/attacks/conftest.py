"""How many examples the property-based tests try: a few in ``scripts/test``, more in ``--ci``, most in ``--all``."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = {"none": 30, "sample": 150, "all": 1500}
"""By ``--slow``."""


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported: the same examples in every run, kept nowhere."""
    settings.register_profile(
        "attacks",
        max_examples=EXAMPLES[config.getoption("--slow")],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("attacks")
