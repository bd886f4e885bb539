"""What tuning needs of every backend: candidates that can be written down, the backend's own first, and an end."""

from __future__ import annotations

import json

import pytest

from polymoe.backends import BACKENDS
from polymoe.bench.cases import CASES
from polymoe.machine import DEVICES, Machine
from polymoe.problem.verdict import Accepted

PACKAGES = {"torch": "2.11.0", "triton": "3.6.0"}


@pytest.mark.parametrize("device", ["cpu", "h200", "rtx4090"])
@pytest.mark.parametrize("name", BACKENDS)
def test_candidates(name: str, device: str) -> None:
    backend, machine = BACKENDS[name], Machine(DEVICES[device], PACKAGES)
    for case in CASES.values():
        problem = case.problem()
        if not isinstance(backend.check(problem, machine), Accepted):
            continue
        for tokens in (1, 100, 8192):
            found = backend.tuning_configs(problem, machine, tokens)
            assert found[0] == backend.configure(problem, machine, tokens)
            assert len(found) == len(set(found)) <= 64
            for config in found:
                assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
            # With all as fast as each other there is soon nothing new.
            tried = dict.fromkeys(found, 1.0)
            for _ in range(8):
                tried |= dict.fromkeys(backend.tuning_configs(problem, machine, tokens, list(tried.items())), 1.0)
            assert set(backend.tuning_configs(problem, machine, tokens, list(tried.items()))) <= set(tried)
