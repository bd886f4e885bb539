"""OffloadedExperts: all experts of a layer in page-locked host memory, those used last in slots on the GPU."""

from __future__ import annotations

import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError, PlanError, UnsupportedProblem
from polymoe.layer.experts import FusedExperts
from polymoe.layer.load_check import check_layer, require_planned
from polymoe.layer.runtime import LayerRuntime, on_device
from polymoe.layouts import Packed
from polymoe.layouts.pack_check import pack_checked
from polymoe.machine import host_memory
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights

__all__ = ["CacheStats", "LeastRecentlyUsed", "OffloadedExperts", "require_slots", "slots_of"]

_BACKENDS = ("cuda", "triton", "torch", "reference")
"""Those whose packed tensors are rows of experts that are read where they are, so that any row can hold any expert."""


_LINKS = (("PCIe 4 x16, 26 GB/s", 26e9), ("PCIe 5 x16, 55 GB/s", 55e9))
"""Nominal rates from host memory to the GPU, bytes/s."""


@dataclass(slots=True)
class CacheStats:
    """Counts of one layer since it was loaded.

    Attributes:
        hits, misses: experts that a call needed and that were in a slot, or had to be copied from host memory.
        copied_bytes: what was copied from host memory.
        sweeps: calls that needed more experts than there are slots.
    """

    hits: int = 0
    misses: int = 0
    copied_bytes: int = 0
    sweeps: int = 0


class LeastRecentlyUsed:
    """Which expert is in which slot. Of slots that a call does not need, the one used least recently is taken first.

    Args:
        slots: their number.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.slot_of: OrderedDict[int, int] = OrderedDict()

    def place(self, experts: Sequence[int]) -> list[tuple[int, int]]:
        """Give each of ``experts`` (distinct, at most as many as slots) a slot.

        Returns:
            ``(expert, slot)`` of those that were in none, and have to be copied.
        """
        missing = []
        for expert in experts:
            if expert in self.slot_of:
                self.slot_of.move_to_end(expert)
            else:
                missing.append(expert)
        placed = []
        for expert in missing:  # experts of this call are the last: none of them is evicted
            slot = len(self.slot_of)
            if slot == self.slots:
                slot = self.slot_of.popitem(last=False)[1]
            self.slot_of[expert] = slot
            placed.append((expert, slot))
        return placed


class OffloadedExperts(FusedExperts):
    """A :class:`FusedExperts` that is larger than its share of the GPU's memory.

    All experts lie in page-locked host memory. ``slots`` of them also lie on the GPU, and a call copies those that it
    needs and that are not there. A call that needs more experts than there are slots gathers all it needs in a buffer
    of one whole layer, which layers of the same shapes share, and leaves the slots as they are. Each call runs the
    kernels, with the configuration, of a layer that is wholly on the GPU. With ``cuda`` and ``triton`` the result is
    bitwise the same; CPU backends add a token's experts in another order.

    The ids of a call are read on the host, so that calls cannot be captured in a CUDA graph. Make one with
    ``load_experts(..., slots=...)``.

    Args:
        resident: the packed layer; not to be used any more.
        slots: experts on the GPU, from A (experts active per token) to one less than the layer has.

    Raises:
        ArgumentError: for too few or too many slots.
        UnsupportedProblem: for a backend whose packed tensors cannot be copied expert by expert.
        PlanError: if the host has not enough memory, or it cannot be page-locked.
    """

    def __init__(self, resident: FusedExperts, slots: int) -> None:
        problem, packed, choice = resident.problem, resident.packed, resident._plans.request
        require_slots(problem, slots)
        _require_rows(resident)
        self._host = _HostStore(packed)
        self._whole = _Whole.shared_by(packed.tensors)
        self._whole_runtime = LayerRuntime(resident._plans, self._whole.tensors)
        self._lru, self.slots, self._stats, self._lock = LeastRecentlyUsed(slots), slots, CacheStats(), threading.Lock()
        self._done: torch.cuda.Event | None = None
        self._key = str(next(_KEYS))
        rows = {name: t.new_empty(slots, *t.shape[1:]) for name, t in packed.tensors.items()}
        super().__init__(problem, Packed(packed.layout, packed.spec, rows), choice)
        self._map_E = torch.full((problem.spec.experts,), -1, dtype=torch.int32, device=self.device)
        _LAYERS[self._key] = self

    @property
    def packed(self) -> Packed:
        """All packed experts, in host memory."""
        return Packed(
            self._plans.layout, self.problem.spec, dict(zip(self._plans.names, self._host.tensors, strict=True))
        )

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert: what a miss copies."""
        return self.packed.nbytes // self.problem.spec.local_experts

    def cache_stats(self) -> dict[str, int]:
        """Return the counts of :class:`CacheStats` by name."""
        return asdict(self._stats)

    def forward(
        self,
        x_TH: Tensor,
        topk_ids_TA: Tensor,
        topk_weights_TA: Tensor,
        *,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        x_scales: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`FusedExperts.forward`. It waits until the GPU has computed ``topk_ids_TA``.

        Raises:
            ArgumentError: as there, and for an ``expert_map``.
            UnsupportedProblem: in the capture of a CUDA graph.
        """
        if expert_map is not None:
            raise ArgumentError("expert_map", expected="none: slots have places of their own", got="a tensor")
        call = CallArguments(x_TH, topk_ids_TA, topk_weights_TA, out, workspace, x_scales)
        call.check(self.problem, self.device)
        if not torch.compiler.is_compiling():
            return self._run(call)
        y_TH = torch.ops.polymoe.offloaded_experts(
            x_TH, topk_ids_TA, topk_weights_TA, self._key, call.out_dtype(self.problem), x_scales
        )
        return y_TH if out is None else out.copy_(y_TH)

    def _run(self, call: CallArguments) -> Tensor:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedProblem(
                "experts in host memory",
                expected="calls outside CUDA graphs",
                got="the capture of one",
                hint="do without graphs, or load all experts onto the GPU",
            )
        spec = self.problem.spec
        first = spec.first_expert
        needed = [e - first for e in call.topk_ids_TA.unique().tolist() if first <= e < first + spec.local_experts]
        with self._lock, on_device(self.device):
            if len(needed) > self.slots:
                return self._sweep(call, needed)
            with _after(self):
                self._place(needed)
                return self._runtime.run(call._replace(expert_map=self._map_E))

    def _place(self, needed: Sequence[int]) -> None:
        placed = self._lru.place(needed)
        self._count(len(needed), len(placed))
        if not placed:
            return
        try:
            for slots, host in zip(self._layer.tensors(self), self._host.tensors, strict=True):
                for expert, slot in placed:
                    slots[slot].copy_(host[expert], non_blocking=True)
        except BaseException:
            self._empty()
            raise
        self._write_map()

    def _write_map(self) -> None:
        places = [-1] * self.problem.spec.experts
        for expert, slot in self._lru.slot_of.items():
            places[self.problem.spec.first_expert + expert] = slot
        self._map_E = torch.tensor(places, dtype=torch.int32, device=self.device)

    def _sweep(self, call: CallArguments, needed: Sequence[int]) -> Tensor:
        """Run a call on the whole layer's buffer: experts in slots from there, the others from host memory."""
        here = [e for e in needed if e in self._lru.slot_of]
        slots = torch.tensor([self._lru.slot_of[e] for e in here], device=self.device)
        rows = torch.tensor(here, device=self.device)
        missing = [e for e in needed if e not in self._lru.slot_of]
        self._count(len(needed), len(missing))
        self._stats.sweeps += 1
        with self._whole.lock, _after(self), _after(self._whole):
            for whole, kept, host in zip(
                self._whole.tensors, self._layer.tensors(self), self._host.tensors, strict=True
            ):
                for low, high in _ranges(missing):
                    whole[low:high].copy_(host[low:high], non_blocking=True)
                if here:  # as bytes: not every dtype of codes and scales can be indexed
                    _bytes(whole).index_copy_(0, rows, _bytes(kept).index_select(0, slots))
            return self._whole_runtime.run(call)

    def _count(self, needed: int, missing: int) -> None:
        self._stats.hits += needed - missing
        self._stats.misses += missing
        self._stats.copied_bytes += missing * self.expert_bytes

    def _empty(self) -> None:
        self._lru = LeastRecentlyUsed(self.slots)
        self._write_map()

    def update(self, weights: ExpertWeights, *, check: bool = False, wait: bool = True) -> None:
        """Replace all experts, as :meth:`FusedExperts.update`; one that fails changes nothing, and it always waits."""
        present = self._layer.layout, self.packed
        require_planned(self.problem, weights, self.device, "update", "load these experts again", present)
        packed = self._plans.packed(self._whole.tensors)
        with self._lock, self._whole.lock, on_device(self.device), _after(self), _after(self._whole):
            pack_checked(self._layer.layout, weights, self.device, "update", out=packed, compare=check)
            if check:
                check_layer(self._whole_runtime, self.problem, weights, "update")
            self._host.copy_from(self._whole.tensors)
            self._empty()

    def check(self, weights: ExpertWeights | None = None, *, where: str = "experts") -> None:
        """Compare up to four experts with the reference, as :meth:`FusedExperts.check`, from host memory."""
        with self._lock, self._whole.lock, on_device(self.device), _after(self), _after(self._whole):
            for whole, host in zip(self._whole.tensors, self._host.tensors, strict=True):
                whole.copy_(host)
            check_layer(self._whole_runtime, self.problem, weights or self.weights, where)

    def _apply(self, fn: Any, recurse: bool = True) -> OffloadedExperts:
        device = fn(torch.empty(0, dtype=torch.int8, device=self.device)).device
        if device != self.device:
            raise UnsupportedProblem("to(device)", expected=f"{self.device}, where the slots are", got=str(device),
                                     hint="load the experts again on the other device")  # fmt: skip
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedProblem("a copy of experts in host memory", expected="one owner of page-locked memory",
                                 got="copy or pickle", hint="load the experts again")  # fmt: skip

    def summary(self) -> str:
        """Where the experts lie, and what a miss costs, as one line."""
        size, experts = self.expert_bytes, self.problem.spec.local_experts
        slots, host = format_bytes(self.slots * size), format_bytes(self.packed.nbytes)
        times = " or ".join(f"{1e6 * size / rate:.0f} us ({name})" for name, rate in _LINKS)
        return (
            f"{self.slots} of {experts} experts in slots on {self.device} ({slots}), all in host memory ({host}); "
            f"a miss copies {format_bytes(size)}, predicted {times}"
        )

    def extra_repr(self) -> str:
        """The problem, and where the experts lie."""
        return f"{self.problem}, {self._plans.layout}, {self.summary()}"


_KEYS = count()
_LAYERS: weakref.WeakValueDictionary[str, OffloadedExperts] = weakref.WeakValueDictionary()
"""By the key that a compiled graph contains."""


@torch.library.custom_op("polymoe::offloaded_experts", mutates_args=())
def _offloaded_experts(
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    key: str,
    dtype: torch.dtype,
    x_scales: Tensor | None = None,
) -> Tensor:
    return _LAYERS[key]._run(CallArguments(x_TH, topk_ids_TA, topk_weights_TA, x_scales=x_scales))


@_offloaded_experts.register_fake
def _(
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    key: str,
    dtype: torch.dtype,
    x_scales: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(x_TH, dtype=dtype, memory_format=torch.contiguous_format)


def require_slots(problem: Problem, slots: int) -> None:
    """Check a number of slots.

    Raises:
        ArgumentError: unless the experts of a token fit, and not all experts do.
    """
    experts = problem.spec.local_experts
    least = min(problem.top_k, experts)
    if not least <= slots < experts:
        raise ArgumentError(
            "slots",
            expected=f"{least} (the experts of a token) to {experts - 1} (one less than the layer has)",
            got=str(slots),
            hint="without slots all experts lie on the GPU, which is faster" if slots >= experts else None,
        )


def slots_of(expert_memory: str, layers: Sequence[ExpertsSpec], top_k: int) -> int:
    """Return the slots of each layer of a model for an ``expert_memory``.

    Args:
        expert_memory: a number of slots such as "32slots", or GPU memory for all slots, for the buffer of one layer
            that layers share, and for the layer that is being loaded, such as "16GiB" or "512MiB".
        layers: the experts of each layer.
        top_k: experts active per token.

    Raises:
        ArgumentError: for another text, for memory in which the experts of a token have no room, and for memory that
            holds all experts.
    """
    found = re.fullmatch(r"(?:(\d+) ?slots?|(\d+(?:\.\d+)?) ?([MG])iB)", expert_memory)
    if found is None:
        raise ArgumentError("expert_memory", expected="32slots, 16GiB or 512MiB", got=repr(expert_memory))
    if found[1]:
        return int(found[1])
    memory = float(found[2]) * (2**30 if found[3] == "G" else 2**20)
    whole = 2 * max(spec.local_bytes for spec in layers)
    slot = sum(spec.local_bytes / spec.local_experts for spec in layers)
    if memory >= slot * min(spec.local_experts for spec in layers):
        got, total = format_bytes(memory), format_bytes(sum(spec.local_bytes for spec in layers))
        hint = "leave expert_memory out: all experts lie on the GPU then"
        raise ArgumentError("expert_memory", expected=f"less than all experts take, {total}", got=got, hint=hint)
    if memory < whole + top_k * slot:
        raise ArgumentError(
            "expert_memory",
            expected=f"{format_bytes(whole + top_k * slot)}: two whole layers, and {top_k} slots in each layer",
            got=format_bytes(memory),
        )
    return int((memory - whole) / slot)


def _require_rows(resident: FusedExperts) -> None:
    problem, packed = resident.problem, resident.packed
    where = "experts in host memory"
    for step in resident.explain().require().steps:
        if step.backend not in _BACKENDS:
            hint = 'load with backend="cuda" or backend="triton"'
            raise UnsupportedProblem(where, expected=f"backend {' or '.join(_BACKENDS)}", got=step.backend, hint=hint)
    for name, tensor in packed.tensors.items():
        if tensor.dim() < 1 or len(tensor) != problem.spec.local_experts:
            got = f"{name} {list(tensor.shape)} in layout {packed.layout}"
            raise UnsupportedProblem(where, expected="packed tensors with a row for each expert", got=got)
    if problem.activations.global_scale:
        expected = "activations whose scales belong to one expert"
        raise UnsupportedProblem(where, expected=expected, got=str(problem.activations))


class _HostStore:
    """Page-locked copies of a layer's packed tensors, of exactly their size."""

    def __init__(self, packed: Packed) -> None:
        tensors = list(packed.tensors.values())
        memory = host_memory()
        if memory is not None and packed.nbytes > memory[0]:
            raise PlanError(
                "host memory for experts",
                expected=f"{format_bytes(packed.nbytes)} for this layer",
                got=f"{format_bytes(memory[0])} free",
                hint="end other programs; all experts of the model need room in host memory",
            )
        self.tensors = [torch.empty_like(t, device="cpu", memory_format=torch.contiguous_format) for t in tensors]
        locked: list[int] = []
        weakref.finalize(self, _unlock, locked)
        if tensors[0].is_cuda:
            for tensor in self.tensors:
                _lock_pages(tensor)
                locked.append(tensor.data_ptr())
        self.copy_from(tensors)

    def copy_from(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite all experts, and wait for it."""
        for host, tensor in zip(self.tensors, tensors, strict=True):
            host.copy_(tensor)


def _lock_pages(tensor: Tensor) -> None:
    if not tensor.numel():
        return
    size = tensor.numel() * tensor.element_size()
    code = int(_cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    if code:
        raise PlanError(
            "host memory for experts",
            expected=f"{format_bytes(size)} of page-locked memory",
            got=f"CUDA error {code}",
            hint="the host has too little free memory, or a container or WSL limits what may be locked",
        )


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unlock(addresses: list[int]) -> None:
    for address in addresses:
        _cudart().cudaHostUnregister(address)


class _Whole:
    """A buffer of one whole packed layer, for calls that need more experts than there are slots."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.lock = tensors, threading.Lock()
        self.device = tensors[0].device
        self._done: torch.cuda.Event | None = None

    @classmethod
    def shared_by(cls, tensors: dict[str, Tensor]) -> _Whole:
        """Return the buffer of layers with such tensors; the first layer's own tensors become it."""
        key = tuple((name, t.dtype, t.shape, t.device) for name, t in tensors.items())
        with _WHOLE_LOCK:
            found = _WHOLE.get(key)
            if found is None:
                found = _WHOLE[key] = cls(list(tensors.values()))
            return found


_WHOLE: weakref.WeakValueDictionary[tuple[object, ...], _Whole] = weakref.WeakValueDictionary()
_WHOLE_LOCK = threading.Lock()


@contextmanager
def _after(owner: Any) -> Iterator[None]:
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


def _bytes(tensor: Tensor) -> Tensor:
    """A view of contiguous rows as bytes, [rows, bytes of a row]."""
    return tensor.flatten(1).view(torch.uint8) if tensor.dim() > 1 else tensor[:, None].view(torch.uint8)
