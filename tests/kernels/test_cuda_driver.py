"""Launches through the driver's library, of which a stand-in records the calls."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from polymoe.kernels.cuda.driver import CapturedLoop, DriverError, Kernel, Launch

KIB = 1024


class Args(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int),)


class Driver:
    """Records limits of shared memory and launches; ``during`` runs within a call that sets a limit."""

    def __init__(self) -> None:
        self.limits: list[tuple[int, int]] = []
        self.launches: list[Any] = []
        self.codes: list[int] = []
        self.during: Any = lambda: None

    def cuKernelSetAttribute(self, attribute: int, value: int, handle: Any, device: int) -> int:
        self.limits.append((device, value))
        self.during()
        return 0

    def cuLaunchKernelEx(self, config: Any, handle: Any, parameters: Any, extra: Any) -> int:
        self.launches.append(handle)
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"too much"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return Driver()


def kernel(driver: Driver) -> Kernel:
    return Kernel(driver, ctypes.c_void_p(7), "gemm")


def test_the_limit_of_shared_memory_only_grows(driver: Driver) -> None:
    gemm = kernel(driver)
    for kib in (32, 100, 64, 200):
        assert isinstance(gemm.prepare(Args(), 32, kib * KIB), Launch)
    assert driver.limits == [(1, 100 * KIB), (1, 200 * KIB)]


def test_threads_do_not_lower_each_others_limit(driver: Driver) -> None:
    """A layer that needs less prepares its launch while another one's limit is being set."""
    gemm = kernel(driver)
    other = threading.Thread(target=gemm.prepare, args=(Args(), 32, 100 * KIB))

    def during() -> None:
        if not other.ident:
            other.start()
            other.join(0.2)

    driver.during = during
    gemm.prepare(Args(), 32, 200 * KIB)
    other.join()
    assert driver.limits == [(1, 200 * KIB)]


def test_a_refused_launch_names_the_kernel(driver: Driver) -> None:
    launch = kernel(driver).prepare(Args(), 32)
    launch(0)
    driver.codes = [1]
    with pytest.raises(DriverError, match=r"launching gemm: too much \(1\)"):
        launch(0)
    assert len(driver.launches) == 2


class CapturingDriver:
    """A driver with a stream that captures a graph, whose next node depends on node 5."""

    def __init__(self, refused: str = "") -> None:
        self.calls: list[str] = []
        self.refused = refused
        self.bodies = (ctypes.c_void_p * 1)(0xB0)
        self.mode = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.refused:
                return 1
            if result := getattr(type(self), f"on_{name}", None):
                result(self, *arguments)
            return 0

        return call

    def on_cuStreamGetCaptureInfo_v3(self, stream: Any, status: Any, id: Any, *found: Any) -> None:
        assert stream.value == 7
        for output, value in zip(found, (0x60, 5, None, 1), strict=True):
            output._obj.value = value

    def on_cuGraphConditionalHandleCreate(self, handle: Any, graph: Any, context: Any, value: int, flags: int) -> None:
        assert (graph.value, value, flags) == (0x60, 0, 1)  # not entered unless a kernel says so
        handle._obj.value = 0xC0

    def on_cuGraphAddNode_v2(self, node: Any, graph: Any, nodes: Any, edges: Any, count: Any, params: Any) -> None:
        assert (graph.value, nodes.value, edges.value, count.value) == (0x60, 5, None, 1)
        given = params._obj
        assert ctypes.sizeof(given) == 256
        assert (given.type, given.handle, given.condition, given.size) == (13, 0xC0, 1, 1)
        given.bodies = self.bodies
        node._obj.value = 6

    def on_cuStreamUpdateCaptureDependencies_v2(
        self, stream: Any, node: Any, data: Any, count: Any, flags: int
    ) -> None:
        assert (stream.value, node._obj.value, count.value, flags) == (7, 6, 1, 1)

    def on_cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        mode._obj.value, self.mode = self.mode, mode._obj.value

    def on_cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert self.mode == 2
        stream._obj.value = 9

    def on_cuStreamBeginCaptureToGraph(self, stream: Any, graph: Any, *rest: Any) -> None:
        assert (stream.value, graph.value, rest[-1]) == (9, 0xB0, 2)

    def on_cuGetErrorString(self, code: int, text: Any) -> None:
        text._obj.value = b"not supported"


AFTER = ["cuStreamEndCapture", "cuStreamDestroy_v2", "cuThreadExchangeStreamCaptureMode"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_in_a_graph(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The body is captured to the node's own graph; what fails in it leaves no capture and no stream behind."""
    driver = CapturingDriver()
    monkeypatch.setattr("polymoe.kernels.cuda.driver._open_driver", lambda: driver)
    loop = CapturedLoop(7)
    assert loop.condition == 0xC0
    with pytest.raises(KeyError) if fails else nullcontext(), loop.body() as stream:
        assert stream == 9
        assert driver.calls[-1] == "cuStreamBeginCaptureToGraph"
        if fails:
            raise KeyError
    assert driver.calls[-3:] == AFTER
    assert driver.mode == 0


def test_a_loop_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CapturingDriver("cuStreamBeginCaptureToGraph")
    monkeypatch.setattr("polymoe.kernels.cuda.driver._open_driver", lambda: driver)
    with (
        pytest.raises(DriverError, match=r"loops in CUDA graphs: cuStreamBeginCaptureToGraph: not supported \(1\)"),
        CapturedLoop(7).body(),
    ):
        raise AssertionError("entered")
    assert driver.calls[-2:] == AFTER[1:]
    assert driver.mode == 0
