"""HostStore: all packed experts of a layer in page-locked host memory."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polymoe.common.units import format_bytes
from polymoe.errors import PlanError
from polymoe.layouts import Packed
from polymoe.machine import cpus_near, host_memory

_MAPPED = 2  # cudaHostRegisterMapped: kernels read it
_WHERE = "host memory for experts"

_LOCKED_BYTES: dict[int, int] = {}
"""Bytes by address of what this process has page-locked."""


def require_host_memory(nbytes: int, of: str) -> None:
    """Check that the host, or the container, has so much free memory.

    Args:
        nbytes: of all experts of a layer or a model.
        of: which, for the message.

    Raises:
        PlanError: otherwise.
    """
    memory = host_memory()
    if memory is not None and nbytes > memory[0]:
        raise PlanError(
            _WHERE,
            expected=f"{format_bytes(nbytes)} for {of}",
            got=f"{format_bytes(memory[0])} free of {format_bytes(memory[1])}{_locked()}",
            hint="end other programs; all experts of the model need room in host memory",
        )


class PageLocked:
    """Keeps the pages of tensors in host memory, so that copy engines and kernels read them, while it lives.

    Raises:
        PlanError: if the driver refuses; all pages are unlocked then.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        addresses: list[int] = []
        self._unlock = weakref.finalize(self, _unlock, addresses)
        try:
            for tensor in tensors:
                if tensor.numel():
                    _lock(tensor, addresses)
        except BaseException:
            self._unlock()
            raise


class HostStore:
    """Page-locked copies of a layer's packed tensors, of exactly their size.

    Raises:
        PlanError: if the host has too little memory, or it cannot be page-locked; nothing is kept then.
    """

    def __init__(self, packed: Packed) -> None:
        tensors = list(packed.tensors.values())
        require_host_memory(packed.nbytes, "this layer")
        self.tensors = [torch.empty_like(t, device="cpu", memory_format=torch.contiguous_format) for t in tensors]
        with near(tensors[0].device):
            self._locked = PageLocked(self.tensors if tensors[0].is_cuda else ())
        self.copy_from(tensors)

    def copy_from(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite all experts, and wait for it."""
        for host, tensor in zip(self.tensors, tensors, strict=True):
            host.copy_(tensor)


@contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Keep this thread on the CPUs of a GPU's NUMA node: pages that it touches first, as locking them does, lie on that
    node while there is room."""
    if device.type != "cuda":
        yield
        return
    cpus = cpus_near(torch.cuda.current_device() if device.index is None else device.index)
    with on_cpus(cpus):
        yield


@contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """Keep this thread on those of ``cpus`` that it may run on; where there are none, and on other systems than Linux,
    wherever it is."""
    if sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    if not before & cpus:
        yield
        return
    os.sched_setaffinity(0, before & cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _lock(tensor: Tensor, addresses: list[int]) -> None:
    size = tensor.numel() * tensor.element_size()
    code = int(_cudart().cudaHostRegister(tensor.data_ptr(), size, _MAPPED))
    if code:
        raise PlanError(
            _WHERE,
            expected=f"{format_bytes(size)} of page-locked memory",
            got=f"CUDA error {code}{_free()}{_locked()}",
            hint="the host has too little free memory, or a container or WSL limits what may be locked",
        )
    addresses.append(tensor.data_ptr())
    _LOCKED_BYTES[tensor.data_ptr()] = size


def _free() -> str:
    memory = host_memory()
    return "" if memory is None else f", with {format_bytes(memory[0])} of {format_bytes(memory[1])} free"


def _locked() -> str:
    return f", {format_bytes(sum(_LOCKED_BYTES.values()))} page-locked by this process already" if _LOCKED_BYTES else ""


def _unlock(addresses: list[int]) -> None:
    if addresses:
        torch.cuda.synchronize()  # copies may be under way
    for address in addresses:
        _cudart().cudaHostUnregister(address)
        _LOCKED_BYTES.pop(address, None)
    addresses.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()
