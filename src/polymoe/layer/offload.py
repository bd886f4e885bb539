"""OffloadedExperts: all experts of a layer in page-locked host memory, those used last in slots on the GPU."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError, UnsupportedProblem, quoted
from polymoe.layer.experts import FusedExperts
from polymoe.layer.host_store import HostStore, require_host_memory
from polymoe.layer.load_check import check_layer
from polymoe.layer.rows import require_rows, rows_as_bytes
from polymoe.layer.runtime import LayerRuntime, on_device, refuse_gradient
from polymoe.layer.slots import CpuSlots, GpuSlots, run_in_waves
from polymoe.layer.sweep import Buffer, SharedBuffers, after
from polymoe.layouts import Packed
from polymoe.layouts.staging import ordinary_tensors
from polymoe.machine import Device
from polymoe.machine.link import links
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights

_NEARLY_ALL = 0.95
"""Share of a layer's experts that a call needs, from which on all of the next layer's are copied ahead: what it does
not need takes the link less time than the link would be idle."""


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


class OffloadedExperts(FusedExperts):
    """A :class:`FusedExperts` that is larger than its share of the GPU's memory.

    All experts lie in page-locked host memory. ``slots`` of them also lie on the GPU, and a call copies those that it
    needs and that are not there. A call that needs more experts than there are slots gathers all it needs in a buffer
    of one whole layer, which layers of the same shapes share, and leaves the slots as they are; meanwhile the experts
    of the next layer are copied to a second buffer, where there is memory for one. Each call runs the
    kernels, with the configuration, of a layer that is wholly on the GPU. With ``cuda`` and ``triton`` the result is
    bitwise the same; CPU backends add a token's experts in another order.

    A call of at most ``slots`` ids (T * A) needs nothing of the host: a kernel on the GPU gives experts their slots and
    another one copies those that are missing, so that CUDA graphs capture such calls. Of a call of more ids the host
    waits for the ids; in the capture of a CUDA graph it runs in waves of ``slots`` experts instead. Make one with
    ``load_experts(..., slots=...)``.

    Args:
        resident: the packed layer; not to be used any more.
        slots: experts on the GPU, from A (experts active per token) to one less than the layer has.

    Raises:
        ArgumentError: for too few or too many slots.
        UnsupportedProblem: for a backend whose packed tensors cannot be copied expert by expert, and for a GPU that
            shares the host's memory.
        PlanError: if the host has not enough memory, or it cannot be page-locked.
    """

    def __init__(self, resident: FusedExperts, slots: int) -> None:
        problem, packed, choice = resident.problem, resident.packed, resident._plans.request
        require_slots(problem, slots)
        require_own_memory(choice.machine.device)
        hint = 'load with backend="cuda" or backend="triton"'
        require_rows(resident.explain(), packed, "experts in host memory", hint)
        with ordinary_tensors():
            self._host = HostStore(packed)
            rows = {name: t.new_empty(slots, *t.shape[1:]) for name, t in packed.tensors.items()}
        self.slots, self._swept, self._lock = slots, CacheStats(), threading.Lock()
        self._done: torch.cuda.Event | None = None
        self._key = str(next(_KEYS))
        self._on_buffers: dict[int, LayerRuntime] = {}
        super().__init__(problem, Packed(packed.layout, packed.spec, rows), choice)
        self._slots = self._empty_slots()
        self._shared = SharedBuffers.of(self, packed.tensors)
        _LAYERS[self._key] = self

    def _empty_slots(self) -> CpuSlots | GpuSlots:
        self._rows = self._runtime
        kind = GpuSlots if self.device.type == "cuda" else CpuSlots
        return kind(self.problem.spec, self._rows.tensors, self._host.tensors)

    @property
    def packed(self) -> Packed:
        """All packed experts, in host memory."""
        return self._plans.packed(self._host.tensors)

    @property
    def weights(self) -> ExpertWeights:
        """The experts as the checkpoint has them, read from host memory."""
        return self._layer.layout.unpack(self.packed)

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert: what a miss copies."""
        return self.packed.nbytes // self.problem.spec.local_experts

    def cache_stats(self) -> dict[str, int]:
        """Return the counts of :class:`CacheStats` by name. Waits for the GPU."""
        hits, misses = self._slots.counts()
        swept = self._swept
        copied = misses * self.expert_bytes + swept.copied_bytes
        return asdict(CacheStats(hits + swept.hits, misses + swept.misses, copied, swept.sweeps))

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
        """See :meth:`FusedExperts.forward`. With more ids than slots, it waits until the GPU has computed the ids,
        unless a CUDA graph captures it.

        Raises:
            ArgumentError: as there, and for an ``expert_map``.
        """
        if expert_map is not None:
            raise ArgumentError("expert_map", expected="none: slots have places of their own", got="a tensor")
        call = CallArguments(x_TH, topk_ids_TA, topk_weights_TA, out, workspace, x_scales)
        call.check(self.problem, self.device)
        if not (torch.compiler.is_compiling() or is_tracing()):
            return self._run(call)
        # An exported graph would know the layer by a number of this process. With torch 2.11, is_exporting() is true
        # whenever Dynamo traces; the flag behind it is not.
        if getattr(torch.compiler, "_is_exporting_flag", False) or is_tracing():
            expected, hint = "experts whose tensors are the graph's", "load the experts without slots"
            raise UnsupportedProblem("torch.export", expected=expected, got="experts in host memory", hint=hint)
        (x_TH, ids_TA, weights_TA, *_), refused = call.without_gradients()
        dtype = call.out_dtype(self.problem)
        y_TH = torch.ops.polymoe.offloaded_experts(x_TH, ids_TA, weights_TA, self._key, dtype, x_scales, refused)
        return y_TH if out is None else out.copy_(y_TH)

    def _run(self, call: CallArguments) -> Tensor:
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ids_TA, needed = call.topk_ids_TA, None
        if not ids_TA.numel():
            return self._runtime.run(call)
        if self.device.type == "cpu":
            call.check_values(self.problem)
        if ids_TA.numel() > self.slots and not capturing:
            spec = self.problem.spec
            first = spec.first_expert
            needed = [e - first for e in ids_TA.unique().tolist() if first <= e < first + spec.local_experts]
        # Events order calls on several streams. A capture belongs to one stream; what replays it orders the replays.
        with self._lock, on_device(self.device):
            if self._runtime is not self._rows:  # other code has replaced what is in the buffers
                self._slots = self._empty_slots()
            if capturing and ids_TA.numel() > self.slots:
                call, step = self._rows.planned(call)
                run_in_waves(self._slots, step, self.problem, call, self.slots)
                return call.out_TH
            if needed is not None and len(needed) > self.slots:
                return self._sweep(call, needed)
            with nullcontext() if capturing else after(self):
                return self._rows.run(call._replace(topk_ids_TA=self._slots.place(ids_TA)))

    def _sweep(self, call: CallArguments, needed: Sequence[int]) -> Tensor:
        """Run a call on a buffer of the whole layer: experts in slots from there, the others from host memory. Where
        nearly all experts are needed, those of the next layer are copied ahead."""
        shared, stats = self._shared, self._swept
        with shared.lock:
            following = shared.following(self)
            if len(needed) < _NEARLY_ALL * self.problem.spec.local_experts:
                following = None
            slot_of = self._slots.residents()
            ahead = [] if following is None else following._absent()  # waits for the stream, which is idle here
            buffer = shared.take(self._key)
            missing = [e for e in needed if e not in slot_of and e not in buffer.held]
            here = [e for e in needed if e in slot_of and e not in buffer.held]
            self._copy(buffer, missing)
            stats.hits += sum(e in slot_of for e in needed)
            stats.misses += sum(e not in slot_of for e in needed)
            stats.sweeps += 1
            with after(self), after(buffer):
                if here:  # as bytes: not every dtype of codes and scales can be indexed
                    slots = torch.tensor([slot_of[e] for e in here], device=self.device)
                    rows = torch.tensor(here, device=self.device)
                    for to, kept in zip(buffer.tensors, self._rows.tensors, strict=True):
                        rows_as_bytes(to).index_copy_(0, rows, rows_as_bytes(kept).index_select(0, slots))
                shared.copies.wait(buffer)
                result = self._on(buffer).run(call)
            if following is not None and (other := shared.ahead(following._key)) is not None:
                following._copy(other, ahead)
            return result

    def _absent(self) -> list[int]:
        """Return the experts that are in no slot. Waits for the GPU."""
        slot_of = self._slots.residents()
        return [e for e in range(self.problem.spec.local_experts) if e not in slot_of]

    def _copy(self, buffer: Buffer, experts: Sequence[int]) -> None:
        self._shared.copy(buffer, self._host.tensors, experts)
        self._swept.copied_bytes += len(experts) * self.expert_bytes

    def _on(self, buffer: Buffer) -> LayerRuntime:
        """Return the runtime of this layer whose experts lie in a buffer."""
        found = self._on_buffers.get(id(buffer))  # buffers live as long as any layer that shares them
        if found is None:
            found = self._on_buffers[id(buffer)] = LayerRuntime(self._plans, buffer.tensors)
        return found

    def reserve(self) -> None:
        """Allocate now what calls would allocate when they first need it: the second buffer, where there is memory.

        A serving engine divides the GPU's memory once its model is loaded.
        """
        with self._shared.lock, on_device(self.device):
            self._shared.reserve()

    def update(self, weights: ExpertWeights, *, check: bool = False, wait: bool = True) -> None:
        """Replace all experts, as :meth:`FusedExperts.update`; one that fails changes nothing, and it always waits."""
        with self._lock, self._shared.lock, on_device(self.device):
            buffer = self._shared.settled()
            with after(self), after(buffer):
                self._layer.refill(self._on(buffer), weights, check=check)
                self._host.copy_from(buffer.tensors)
                self._slots.empty()

    def check(self, weights: ExpertWeights | None = None, *, where: str = "experts") -> None:
        """Compare up to four experts with the reference, as :meth:`FusedExperts.check`, from host memory."""
        with self._lock, self._shared.lock, on_device(self.device):
            buffer = self._shared.settled()
            with after(self), after(buffer):
                for to, host in zip(buffer.tensors, self._host.tensors, strict=True):
                    to.copy_(host)
                check_layer(self._on(buffer), self.problem, weights or self.weights, where)

    def _apply(self, fn: Any, recurse: bool = True) -> OffloadedExperts:
        probe = fn(torch.empty(1, dtype=torch.int8, device=self.device))
        if probe.device != self.device:
            expected, hint = f"{self.device}, where the slots are", "load the experts again on the other device"
            raise UnsupportedProblem("to(device)", expected=expected, got=str(probe.device), hint=hint)
        if probe.device.type == "cpu" and probe.is_shared():
            expected, hint = "experts that processes can share", "load the experts without slots"
            raise UnsupportedProblem("share_memory()", expected=expected, got="experts in host memory", hint=hint)
        return self

    def __copy__(self) -> OffloadedExperts:
        """The layer itself: experts in host memory are there once, and slots hold what is there after an update."""
        return self

    def __deepcopy__(self, memo: object) -> OffloadedExperts:
        """The layer itself, also in a copy of its model."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedProblem("pickle", expected="experts that have no page-locked memory",
                                 got="experts in host memory", hint="load the experts again")  # fmt: skip

    def summary(self) -> str:
        """Where the experts lie, and what a miss costs, as one line."""
        size, experts = self.expert_bytes, self.problem.spec.local_experts
        slots, host = format_bytes(self.slots * size), format_bytes(self.packed.nbytes)
        times = " or ".join(
            f"{1e6 * size / rate:.0f} us ({name})" for name, rate in links(self._plans.request.machine.device.name)
        )
        return (
            f"{self.slots} of {experts} experts in slots on {self.device} ({slots}), all in host memory ({host}); "
            f"a miss copies {format_bytes(size)}, predicted {times}"
        )

    def extra_repr(self) -> str:
        """The problem, and where the experts lie."""
        return f"{self.problem}, {self._plans.layout}, {self.summary()}"


def cache_stats_of(model: torch.nn.Module) -> dict[str, dict[str, int]]:
    """Return :meth:`OffloadedExperts.cache_stats` of each layer of a model, by the name of its module."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, OffloadedExperts)]
    return {name.removesuffix(".fused"): layer.cache_stats() for name, layer in layers}


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
    refused: str = "",
) -> Tensor:
    refuse_gradient(refused)
    return _LAYERS[key]._run(CallArguments(x_TH, topk_ids_TA, topk_weights_TA, x_scales=x_scales))


@_offloaded_experts.register_fake
def _(
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    key: str,
    dtype: torch.dtype,
    x_scales: Tensor | None = None,
    refused: str = "",
) -> Tensor:
    return torch.empty_like(x_TH, dtype=dtype, memory_format=torch.contiguous_format)


def require_own_memory(device: Device) -> None:
    """Refuse a GPU whose memory is the host's: it would hold experts twice.

    Raises:
        UnsupportedProblem: for such a GPU.
    """
    if device.unified_memory:
        raise UnsupportedProblem(
            "experts in host memory",
            expected="a GPU with memory of its own",
            got=f"{device}, which shares the host's",
            hint="leave expert_memory and slots out: what the host's memory holds, this GPU holds",
        )


def require_slots(problem: Problem, slots: int, name: str = "slots") -> None:
    """Check a number of slots, which the user gave as the argument ``name``.

    Raises:
        ArgumentError: unless the experts of a token fit, and not all experts do.
    """
    experts = problem.spec.local_experts
    least = min(problem.top_k, experts)
    number = isinstance(slots, int)
    if not (number and least <= slots < experts):
        raise ArgumentError(
            name,
            expected=f"{least} slots (the experts of a token) to {experts - 1} (one less than the layer has)",
            got=quoted(slots),
            hint="without it all experts lie on the GPU, which is faster" if number and slots >= experts else None,
        )


def require_expert_memory(expert_memory: str, expected: str = "32slots, 16GiB or 512MiB") -> tuple[int | None, float]:
    """Return the number of slots, or None and the bytes, that an ``expert_memory`` names.

    Raises:
        ArgumentError: for another text.
    """
    sizes = r"(?:(\d+) ?slots?|(\d+(?:\.\d+)?) ?([MG])iB)"
    found = re.fullmatch(sizes, expert_memory) if isinstance(expert_memory, str) else None
    if found is None:
        raise ArgumentError("expert_memory", expected=expected, got=quoted(expert_memory))
    if found[1]:
        return int(found[1]), 0.0
    return None, float(found[2]) * (2**30 if found[3] == "G" else 2**20)


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
    slots, memory = require_expert_memory(expert_memory, "auto, 32slots, 16GiB or 512MiB")
    return slots_in(memory, layers, top_k) if slots is None else slots


def slots_here(expert_memory: str, layers: Sequence[ExpertsSpec], top_k: int) -> int:
    """Return :func:`slots_of`, where this host has free memory for all experts of these layers.

    Raises:
        ArgumentError: as :func:`slots_of`.
        PlanError: for a host without that memory.
    """
    slots = slots_of(expert_memory, layers, top_k)
    require_host_memory(sum(spec.local_bytes for spec in layers), f"all experts of {len(layers)} layers")
    return slots


def slots_in(memory: float, layers: Sequence[ExpertsSpec], top_k: int, left_by: str = "") -> int:
    """Return the slots of each layer that so many bytes of GPU memory hold, as :func:`slots_of`; raises as it does.
    ``left_by`` says in the error where the number comes from."""
    whole = 2 * max(spec.local_bytes for spec in layers)
    slot = sum(spec.local_bytes / spec.local_experts for spec in layers)
    if memory >= slot * min(spec.local_experts for spec in layers):
        got, total = format_bytes(memory) + left_by, format_bytes(sum(spec.local_bytes for spec in layers))
        hint = "leave it out: all experts lie on the GPU then"
        raise ArgumentError("expert_memory", expected=f"less than all experts take, {total}", got=got, hint=hint)
    if memory < whole + top_k * slot:
        raise ArgumentError(
            "expert_memory",
            expected=f"{format_bytes(whole + top_k * slot)}: two whole layers, and {top_k} slots in each layer",
            got=format_bytes(max(memory, 0)) + left_by,
        )
    return int((memory - whole) / slot)
