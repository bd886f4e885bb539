"""Shared fixtures: the command line in this process; skips for tests that need a GPU."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import typer.main

if TYPE_CHECKING:
    from support.serving import Running

GPU = Path(__file__).parent / "gpu"
"""All tests in here need a GPU."""

pytest_plugins = ["support.tiers", "support.proven"]

# The suite never reaches out: nothing it loads may come from the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nor does it read what this user has tuned, or write there.
_cache = tempfile.TemporaryDirectory(prefix="polymoe-tests-")
os.environ["POLYMOE_CACHE"] = _cache.name
os.environ.pop("COLUMNS", None)  # tables are as wide as it says
# Tensors here are tiny: one thread beats two, and waits for nobody on a busy machine. Subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Started in a shell's background, the suite would hand ignored interrupts on to the commands whose Ctrl-C it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_get_command = functools.cache(typer.main.get_command)
"""Typer makes the command line for each call anew, from the signatures of all commands: most of a short call's time."""


def pytest_unconfigure() -> None:
    _cache.cleanup()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU):
            item.add_marker(pytest.mark.gpu)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``polymoe`` in this process: exit code, stdout, stderr."""
    from polymoe.cli import main

    monkeypatch.setattr(typer.main, "get_command", _get_command)

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["polymoe", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained Qwen3 checkpoint with all weights in BF16."""
    from support.requantized import write

    return write("BF16", tmp_path_factory.mktemp("qwen3") / "bf16")


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """A server around the trained checkpoint, in a thread of this process."""
    from support.serving import running_server

    with running_server() as running:
        yield running
