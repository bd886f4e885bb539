"""A pytest plugin: which kernels the GPU tests prove, and on which GPU (``--proof FILE``).

Every call that a test marked ``gpu`` makes of a backend on a GPU is noted: the backend, the kernel family, the format,
the activations. When the test has ended, each of them becomes a line of the file, with whether the test passed. Tests
of these directories compare results with the reference. Others, and slow ones, which measure time and memory, neither
prove nor refute anything here.
``benchmarks/write_proof.py`` reads the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from polymoe.backends.base import inputs_of
from polymoe.problem.call import CallArguments

DIRECTORIES = ("tests/backends/", "tests/gpu/")
COMMIT = "POLYMOE_TEST_COMMIT"
"""Environment variable: the commit to write, for a checkout without git."""


class Recorder:
    """Notes the cells that run on tensors of one kind of device."""

    def __init__(self, kind: str = "cuda") -> None:
        self.kind = kind
        self.cells: set[tuple[str, str, str, str]] = set()

    def watch(self, backends: Mapping[str, Any], patch: pytest.MonkeyPatch) -> None:
        """Have every runner that these backends bind note its calls here."""
        for kind in {type(backend) for backend in backends.values()}:
            patch.setattr(kind, "bind", self._bind(kind.bind))

    def _bind(self, bind: Any) -> Any:
        def watched(backend: Any, problem: Any, packed: Any) -> Any:
            return _Watched(self, backend.name, problem, bind(backend, problem, packed))

        return watched

    def note(self, name: str, problem: Any, config: Any, out: Tensor) -> None:
        """A call of ``name`` that wrote to ``out``."""
        if out.device.type == self.kind:
            self.cells.add((name, config.kernel_family, problem.spec.format, str(inputs_of(problem, config))))


class _Watched:
    """A runner that says what it runs."""

    def __init__(self, recorder: Recorder, name: str, problem: Any, runner: Any) -> None:
        self._recorder, self._name, self._problem, self._runner = recorder, name, problem, runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, call: CallArguments, config: Any) -> None:
        self._recorder.note(self._name, self._problem, config, call.out_TH)
        self._runner.run(call, config)


class Plugin:
    """Writes what the recorder noted of each test."""

    def __init__(self, path: Path, recorder: Recorder) -> None:
        self.path, self.recorder = path, recorder
        self.written: set[tuple[Any, ...]] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, None]:
        self.recorder.cells.clear()
        outcome = yield
        if "gpu" in item.keywords and "slow" not in item.keywords and item.nodeid.startswith(DIRECTORIES):
            passed = outcome.excinfo is None
            if passed or not issubclass(outcome.excinfo[0], pytest.skip.Exception):
                self.write(item.nodeid.partition("::")[0], passed)

    def write(self, test: str, passed: bool) -> None:
        """A line for each cell of one test, unless there is the same one of this file already."""
        new = [c for c in sorted(self.recorder.cells) if (*c, test, passed) not in self.written]
        self.written.update((*c, test, passed) for c in new)
        if new:
            from polymoe.bench.records import Stamp
            from polymoe.machine import Machine

            stamp = Stamp.now(Machine.of(self.recorder.kind), "scripts/test-gpu", os.environ.get(COMMIT))
            lines = [
                {
                    **dict(zip(("backend", "family", "format", "activations"), cell, strict=True)),
                    **{name: value for name, value in stamp.fields().items() if name != "command"},
                    "test": test, "passed": passed,
                }
                for cell in new
            ]  # fmt: skip
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", type=Path, help="add a line to this file for all that a GPU test proved")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--proof")
    if path is None:
        return
    from polymoe.backends import BACKENDS

    recorder, patch = Recorder(), pytest.MonkeyPatch()
    recorder.watch(BACKENDS, patch)
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(Plugin(path.resolve(), recorder), "polymoe-proven")
