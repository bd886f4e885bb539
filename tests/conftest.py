"""Shared fixtures: seeded random experts, skips for tests that need a GPU."""

from __future__ import annotations

import os

import pytest
import torch

# The suite never reaches out: nothing it loads may come from the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tensors here are tiny: one thread beats two, and waits for nobody on a busy machine. Subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)
