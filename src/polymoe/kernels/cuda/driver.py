"""Launches compiled kernels through the CUDA driver's own library: no compiler, no package beside torch.

Launches go to torch's current stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SHARED_MEMORY, _PROGRAMMATIC = 8, 6  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_..., CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_...
_SHARED_DEFAULT = 48 * 1024  # bytes of shared memory that need no attribute
_CONDITIONAL_NODE, _WHILE = 13, 1  # CU_GRAPH_NODE_TYPE_CONDITIONAL, CU_GRAPH_COND_TYPE_WHILE
_RELAXED, _NON_BLOCKING, _SET_DEPENDENCIES, _ASSIGN_DEFAULT = 2, 1, 1, 1
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
    """One function of a module.

    ``chained`` is whether its launches may start before the kernel in front of them has finished (from SM90 on).
    """

    def __init__(self, driver: Any, handle: ctypes.c_void_p, name: str, *, chained: bool = True) -> None:
        self.driver, self.handle, self.name, self.chained = driver, handle, name, chained
        self._shared: dict[int, int] = {}  # most dynamic shared memory of a launch, by device
        self._lock = threading.Lock()

    def prepare(self, args: ctypes.Structure, threads: int, shared_bytes: int = 0) -> Launch:
        """A launch on torch's current device, to be made as often as one likes.

        Args:
            args: the kernel's one argument, read at each launch.
            threads: of a CTA.
            shared_bytes: dynamic shared memory.
        """
        if shared_bytes > _SHARED_DEFAULT:
            self._allow(shared_bytes, torch.cuda.current_device())
        return Launch(self, args, threads, shared_bytes)

    def _allow(self, shared_bytes: int, device: int) -> None:
        """Let launches have so much dynamic shared memory, and never less than launches of other layers need."""
        with self._lock:
            if shared_bytes > self._shared.get(device, 0):
                code = self.driver.cuKernelSetAttribute(_SHARED_MEMORY, shared_bytes, self.handle, device)
                _check(self.driver, code, f"{self.name}: {shared_bytes} bytes of shared memory")
                self._shared[device] = shared_bytes


class Launch:
    """A kernel with its arguments, ready to be launched: nothing is built for a launch.

    A chained kernel may start before the one in front of it has finished; it waits by itself for what it needs.
    """

    __slots__ = ("_config", "_config_at", "_handle", "_kept", "_kernel", "_launch", "_parameters", "_stream")

    def __init__(self, kernel: Kernel, args: ctypes.Structure, threads: int, shared_bytes: int) -> None:
        attribute = _Attribute(_PROGRAMMATIC, 0, 1)
        self._config = _Config(
            (ctypes.c_uint * 3)(1, 1, 1),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes,
            None,
            ctypes.pointer(attribute),
            int(kernel.chained),
        )
        self._config_at = ctypes.byref(self._config)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._kept = (args, attribute)
        self._kernel, self._handle = kernel, kernel.handle
        self._launch, self._stream = kernel.driver.cuLaunchKernelEx, 0

    def set_grid(self, x: int, y: int = 1) -> None:
        """How many CTAs, in two dimensions."""
        grid = self._config.grid
        grid[0], grid[1] = x, y

    def __call__(self, stream: int) -> None:
        """Launch on a stream of torch's current device."""
        if stream != self._stream:
            self._config.stream, self._stream = stream, stream
        code = self._launch(self._config_at, self._handle, self._parameters, None)
        if code:
            self._launch_again(code)

    def _launch_again(self, code: int) -> None:
        driver = self._kernel.driver
        if code == _INVALID_CONTEXT:
            _enter_context(driver, torch.cuda.current_device())
            code = self._launch(self._config_at, self._handle, self._parameters, None)
        _check(driver, code, f"launching {self._kernel.name}")


class Module:
    """A cubin, loaded for every device of this process.

    Raises:
        DriverError: if there is no driver, or it cannot load the cubin.
    """

    def __init__(self, cubin: bytes) -> None:
        self._driver = _open_driver()
        self._cubin = cubin  # stays: the driver may read it later
        self._library = ctypes.c_void_p()
        _check(
            self._driver,
            self._driver.cuLibraryLoadData(
                ctypes.byref(self._library), ctypes.c_char_p(cubin), None, None, 0, None, None, 0
            ),
            "loading the compiled kernels",
        )

    def kernel(self, name: str, *, chained: bool = True) -> Kernel:
        """The function of that name; see :class:`Kernel`."""
        handle = ctypes.c_void_p()
        code = self._driver.cuLibraryGetKernel(ctypes.byref(handle), self._library, name.encode())
        _check(self._driver, code, f"kernel {name}")
        return Kernel(self._driver, handle, name, chained=chained)


class _NodeParams(ctypes.Structure):
    """CUgraphNodeParams of a conditional node."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("handle", ctypes.c_ulonglong),
        ("condition", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("rest", ctypes.c_ubyte * 208),
    )


class CapturedLoop:
    """A loop in the CUDA graph that captures a stream: a WHILE node, whose condition kernels set on the GPU.

    Args:
        stream: handle of a stream of torch's current device that is being captured.

    Attributes:
        condition: handle that kernels give ``cudaGraphSetConditional``; 0 at each launch of the graph.

    Raises:
        DriverError: if the driver refuses a call. CUDA 12.4's is the first that has such nodes.
    """

    def __init__(self, stream: int) -> None:
        self._driver, self._stream = _open_driver(), ctypes.c_void_p(stream)
        graph, _ = self._graph()
        condition, context = ctypes.c_ulonglong(), self._context()
        self._call("cuGraphConditionalHandleCreate", ctypes.byref(condition), graph, context, 0, _ASSIGN_DEFAULT)
        self.condition = condition.value

    @contextmanager
    def body(self) -> Iterator[int]:
        """Yield the handle of a stream: what goes to it within the context repeats while the condition holds.

        What follows on the captured stream follows the loop. Memory that torch allocates within the context is not the
        graph's, so nothing may be allocated.
        """
        graph, dependencies = self._graph()
        params = _NodeParams(
            type=_CONDITIONAL_NODE, handle=self.condition, condition=_WHILE, size=1, context=self._context()
        )
        node, stream, ended, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
        self._call("cuGraphAddNode_v2", ctypes.byref(node), graph, *dependencies, ctypes.byref(params))
        one = ctypes.c_size_t(1)
        self._call(
            "cuStreamUpdateCaptureDependencies_v2", self._stream, ctypes.byref(node), None, one, _SET_DEPENDENCIES
        )
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # so that a stream may be made
        try:
            self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            body, nothing = ctypes.c_void_p(params.bodies[0]), (None, None, ctypes.c_size_t(0))
            self._call("cuStreamBeginCaptureToGraph", stream, body, *nothing, _RELAXED)
            try:
                yield stream.value or 0
            finally:
                self._call("cuStreamEndCapture", stream, ctypes.byref(ended))
        finally:
            if stream:
                self._driver.cuStreamDestroy_v2(stream)
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _graph(self) -> tuple[ctypes.c_void_p, tuple[Any, Any, ctypes.c_size_t]]:
        """Return the graph that is being captured, and what its next node depends on: nodes, edges and their count."""
        status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
        nodes, edges = ctypes.c_void_p(), ctypes.c_void_p()
        outputs = (ctypes.byref(o) for o in (graph, nodes, edges, count))
        self._call("cuStreamGetCaptureInfo_v3", self._stream, ctypes.byref(status), None, *outputs)
        return graph, (nodes, edges, count)

    def _context(self) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context

    def _call(self, name: str, *arguments: Any) -> None:
        _check(self._driver, getattr(self._driver, name)(*arguments), f"loops in CUDA graphs: {name}")


def mapped_address(address: int) -> int:
    """Return the address at which kernels of torch's current device read page-locked host memory.

    Raises:
        DriverError: if the memory is not page-locked and mapped.
    """
    driver, found = _open_driver(), ctypes.c_void_p()
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    _check(driver, code, "the device's address of host memory")
    return found.value or 0


def _open_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error


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
