"""Launches through the driver's library, of which a stand-in records the calls."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from polymoe.kernels.cuda.driver import DriverError, Kernel, Launch

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
