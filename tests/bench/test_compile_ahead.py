"""Compiling ahead: in other processes, never in the way when it fails; what Triton compiles without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from polymoe.backends.config import Config
from polymoe.backends.reference import Reference
from polymoe.bench.compile_ahead import CompileAhead, compile_one
from polymoe.layouts import Packed
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from support.tiny import TINY


@dataclass(frozen=True)
class Written(Reference):
    """Compiling leaves a file that says what it was given."""

    name: str = "written"
    where: str = ""

    def compile(self, problem: Problem, packed: Packed, call: CallArguments, config: Config) -> None:
        if self.where == "die":
            os._exit(1)
        assert call.out is not None
        devices = {call.x_TH.device.type, call.out.device.type, *(t.device.type for t in packed.tensors.values())}
        elsewhere = os.getpid() != int(os.environ["POLYMOE_TEST_PARENT"])
        text = f"{config} {tuple(call.x_TH.shape)} {sorted(devices)} {elsewhere}"
        (Path(self.where) / f"{len(call.x_TH)}").write_text(text)


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYMOE_TEST_PARENT", str(os.getpid()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_in_another_process_without_memory(tmp_path: Path) -> None:
    backend, problem = Written(where=str(tmp_path)), TINY.problem("nvfp4")
    with CompileAhead(1) as compiler:
        for tokens in (3, 5, 3):
            compiler.submit(backend, "natural", problem, tokens, [Config()])
        assert compiler.first_ready(backend, problem, 3, [Config()], 60) == Config()
        compiler.wait_for_all(60)
    assert (tmp_path / "3").read_text() == "- (3, 64) ['meta'] True"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "5"]


def test_a_process_that_dies_costs_nothing(tmp_path: Path) -> None:
    dying, problem = Written(where="die"), TINY.problem()
    with CompileAhead(1) as compiler:
        compiler.submit(dying, "natural", problem, 1, [Config()])
        compiler.wait_for_all(300)  # the process starts at low priority
        compiler.submit(dying, "natural", problem, 2, [Config()])
        start = time.monotonic()
        assert compiler.first_ready(dying, problem, 2, [Config()], 60) == Config()
        assert time.monotonic() - start < 5


def test_without_processes() -> None:
    with CompileAhead(0) as compiler:
        compiler.submit(Reference(), "natural", TINY.problem(), 1, [Config()])
        assert compiler.first_ready(Reference(), TINY.problem(), 1, [Config()], 60) == Config()
        compiler.wait_for_all(60)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128", "int4_g32", "mxfp4", "nvfp4"])
def test_experts_without_memory_in_every_kind_of_format(format: str) -> None:
    compile_one(Reference(), "natural", TINY.changed(bias=True).problem(format), 4, Config())


TRITON = """
import torch, triton
from triton.backends.compiler import GPUTarget

class NoGpu:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(NoGpu())
from support.tiny import TINY
from polymoe.backends.triton import Triton
from polymoe.bench.compile_ahead import compile_one
from polymoe.machine import DEVICES, Machine

problem = TINY.problem()
compile_one(Triton(), "natural", problem, 16, Triton().configure(problem, Machine(DEVICES["h200"]), 16))
"""


@pytest.mark.slow
def test_triton_kernels_end_in_its_cache_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", TRITON], check=True, env=env)
    names = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert {"grouped_gemm"} <= names
    assert len(list(tmp_path.rglob("grouped_gemm.cubin"))) == 2
