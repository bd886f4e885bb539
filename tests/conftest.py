"""Shared fixtures: seeded random experts, skips for tests that need a GPU."""

from __future__ import annotations

import os

import pytest
import torch

# The suite never reaches out: nothing it loads may come from the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)
