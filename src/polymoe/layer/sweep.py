"""Sweeps: calls that need more experts than there are slots run on a buffer of one whole packed layer, which layers of
the same shapes share. While one runs, experts of the layer expected next are copied to a second buffer, so that the
link from host memory does not wait for GEMMs, nor for what the model does between them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polymoe.layouts.staging import ordinary_tensors

_PIECE_BYTES = 128 * 1024
"""A tensor of fewer bytes for each of the copies that its missing rows need is copied as a whole."""


class Buffer:
    """Room for one whole packed layer.

    Attributes:
        tensors: the packed tensors.
        device: where they are.
        owner: key of the layer whose experts are there, or are being copied; None while it is used.
        held: these experts.
        copied: when the last copies will be done.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.device = tensors, tensors[0].device
        self.owner: str | None = None
        self.held: set[int] = set()
        self.copied: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None


class CopyStream:
    """Copies from host memory in order, beside the kernels of a device. On a CPU they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enqueue(self, copies: Callable[[], None], to: Buffer) -> None:
        """Make copies to a buffer, after the calls that read it."""
        if self.stream is None:
            copies()
            return
        if to._done is not None:
            self.stream.wait_event(to._done)
        with torch.cuda.stream(self.stream):
            copies()
        to.copied = torch.cuda.Event()
        to.copied.record(self.stream)

    def wait(self, buffer: Buffer) -> None:
        """Let the current stream wait for all copies to a buffer."""
        if buffer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.copied)

    def synchronize(self) -> None:
        """Wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()


class SharedBuffers:
    """The buffers of layers of the same shapes: one, and a second one from the first copies ahead on, if there is
    memory. Hold :attr:`lock` to use them.

    Which layer is next is what was seen last time; before that, it is the one loaded after this one.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.lock = threading.Lock()
        self.copies = CopyStream(tensors[0].device)
        self.buffers: list[Buffer] = []  # used last: at the end
        self._most = 2
        self._next: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._loaded = self._last = _nothing
        self._add(tensors)

    @classmethod
    def of(cls, layer: Any, tensors: dict[str, Tensor]) -> SharedBuffers:
        """Return the buffers of layers with such tensors, and count ``layer`` among them; the first layer's own tensors
        become a buffer."""
        key = tuple((name, t.dtype, t.shape, t.device) for name, t in tensors.items())
        with _LOCK:
            found = _SHARED.get(key)
            if found is None:
                found = _SHARED[key] = cls(list(tensors.values()))
        with found.lock:
            if (before := found._loaded()) is not None:
                found._next[before] = weakref.ref(layer)
            found._loaded = weakref.ref(layer)
        return found

    def following(self, layer: Any) -> Any | None:
        """Return the layer that is expected to sweep after ``layer``, which does so now; None if there is none."""
        if (before := self._last()) is not None:
            self._next[before] = weakref.ref(layer)
        self._last = weakref.ref(layer)
        found = self._next.get(layer, _nothing)()
        return None if found is layer else found

    def take(self, key: str) -> Buffer:
        """Return the buffer that has experts of the layer with this key, or the one that was not used last."""
        buffer = next((b for b in self.buffers if b.owner == key), self.buffers[0])
        if buffer.owner != key:
            self.copies.wait(buffer)  # those of another layer, which was expected
            buffer.held = set()
        buffer.owner = None
        self.buffers.remove(buffer)
        self.buffers.append(buffer)
        return buffer

    def reserve(self) -> None:
        """Allocate the second buffer, unless there is one, or no memory for it."""
        if len(self.buffers) < self._most:
            try:
                with ordinary_tensors():
                    self._add([torch.empty_like(t) for t in self.buffers[0].tensors])
            except torch.cuda.OutOfMemoryError:
                self._most = 1
            else:  # kernels ahead in the stream may use its memory
                with after(self.buffers[0]):
                    pass

    def ahead(self, key: str) -> Buffer | None:
        """Return a buffer for the next layer, with this key, beside the one that was taken; None without memory."""
        self.reserve()
        buffer = self.buffers[0] if len(self.buffers) > 1 else None
        if buffer is not None:
            buffer.owner, buffer.held = key, set()
        return buffer

    def settled(self) -> Buffer:
        """Wait for all copies, forget what buffers hold, and return one of them."""
        self.copies.synchronize()
        for buffer in self.buffers:
            buffer.owner, buffer.held = None, set()
        return self.buffers[0]

    def copy(self, buffer: Buffer, host: Sequence[Tensor], experts: Sequence[int]) -> None:
        """Begin to copy experts from host memory; :meth:`CopyStream.wait` before they are used."""
        ranges = list(_ranges(experts))

        def copies() -> None:
            for to, tensor in zip(buffer.tensors, host, strict=True):
                small = tensor.nbytes < _PIECE_BYTES * len(ranges)
                for low, high in [(0, len(tensor))] if small else ranges:
                    to[low:high].copy_(tensor[low:high], non_blocking=True)

        if ranges:
            self.copies.enqueue(copies, buffer)
            buffer.held.update(experts)

    def _add(self, tensors: list[Tensor]) -> None:
        self.buffers.insert(0, Buffer(tensors))
        if self.copies.stream is not None:
            for tensor in tensors:
                tensor.record_stream(self.copies.stream)


def _nothing() -> None:
    return None


_SHARED: weakref.WeakValueDictionary[tuple[object, ...], SharedBuffers] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


@contextmanager
def after(owner: Any) -> Iterator[None]:
    """Order what this stream does to ``owner``'s tensors after what other streams did to them before."""
    if owner.device.type != "cuda":
        yield
        return
    stream = torch.cuda.current_stream(owner.device)
    if owner._done is None:
        owner._done = torch.cuda.Event()
    else:
        stream.wait_event(owner._done)
    try:
        yield
    finally:
        owner._done.record(stream)


def _ranges(experts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(first, last + 1)`` of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(experts) + 1):
        if at == len(experts) or experts[at] != experts[at - 1] + 1:
            yield experts[start], experts[at - 1] + 1
            start = at
