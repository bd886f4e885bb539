"""Launches compiled kernels through the CUDA driver's own library: no compiler, no package beside torch.

Launches go to torch's current stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["DriverError", "Kernel", "Module"]

_SHARED_MEMORY, _PROGRAMMATIC = 8, 6  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_..., CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_...
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread in which nothing has used the GPU yet


class DriverError(RuntimeError):
    """The driver refused a call."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Kernel:
    """One function of a module."""

    def __init__(self, driver: Any, handle: ctypes.c_void_p, name: str) -> None:
        self._driver, self._handle, self.name = driver, handle, name
        self._shared: dict[int, int] = {}

    def __call__(
        self, args: ctypes.Structure, grid: Sequence[int], threads: int, shared_bytes: int = 0, *, early: bool = True
    ) -> None:
        """Launch on torch's current device and stream.

        Args:
            args: the kernel's one argument.
            grid: blocks, up to three numbers.
            threads: of a block.
            shared_bytes: dynamic shared memory.
            early: may start before the kernel in front of it has finished (it waits by itself for what it needs).
        """
        device = torch.cuda.current_device()
        if shared_bytes > max(self._shared.get(device, 0), 48 * 1024):
            _check(
                self._driver,
                self._driver.cuKernelSetAttribute(_SHARED_MEMORY, shared_bytes, self._handle, device),
                f"{self.name}: {shared_bytes} bytes of shared memory",
            )
            self._shared[device] = shared_bytes
        attribute = _Attribute(_PROGRAMMATIC, 0, 1)
        config = _Config(
            (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.pointer(attribute),
            1 if early else 0,
        )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        code = self._driver.cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None)
        if code == _INVALID_CONTEXT:
            _enter_context(self._driver, device)
            code = self._driver.cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None)
        _check(self._driver, code, f"launching {self.name}")


class Module:
    """A cubin, loaded for every device of this process.

    Raises:
        DriverError: if there is no driver, or it cannot load the cubin.
    """

    def __init__(self, cubin: bytes) -> None:
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"no CUDA driver: {error}") from error
        self._cubin = cubin  # stays: the driver may read it later
        self._library = ctypes.c_void_p()
        _check(
            self._driver,
            self._driver.cuLibraryLoadData(
                ctypes.byref(self._library), ctypes.c_char_p(cubin), None, None, 0, None, None, 0
            ),
            "loading the compiled kernels",
        )

    def kernel(self, name: str) -> Kernel:
        """The function of that name."""
        handle = ctypes.c_void_p()
        code = self._driver.cuLibraryGetKernel(ctypes.byref(handle), self._library, name.encode())
        _check(self._driver, code, f"kernel {name}")
        return Kernel(self._driver, handle, name)


def _enter_context(driver: Any, device: int) -> None:
    """Make torch's context of the device this thread's."""
    context = ctypes.c_void_p()
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"the context of device {device}")
    _check(driver, driver.cuCtxSetCurrent(context), f"the context of device {device}")


def _check(driver: Any, code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")
