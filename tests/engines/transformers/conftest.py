"""Checkpoints and models of every family, written and loaded once. Imports nothing optional at the top."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint by the name of its family or variant."""
    from support.family_checkpoints import write

    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = write(name, tmp_path_factory.mktemp("families") / "checkpoint")
        return written[name]

    return get


@pytest.fixture(scope="session")
def pair(checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any, Any]]:
    """The dequantized model, the packed one and its tokenizer, in float32."""
    from dequantized import filled

    from polymoe.engines.transformers import load

    loaded: dict[str, tuple[Any, Any, Any]] = {}

    def get(name: str) -> tuple[Any, Any, Any]:
        if name not in loaded:
            path = checkpoint(name)
            loaded[name] = (filled(path, torch.float32), *load(path, device="cpu", dtype=torch.float32))
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def packed() -> tuple[Any, Any]:
    """The trained GPT-OSS checkpoint, packed, in its own dtype; and its tokenizer."""
    from polymoe.engines.transformers import load
    from support.packed_model import CHECKPOINT

    return load(CHECKPOINT, device="cpu")


@pytest.fixture
def installed() -> Iterator[None]:
    """``install()`` during the test."""
    from polymoe.engines.transformers import install, uninstall

    install()
    yield
    uninstall()
