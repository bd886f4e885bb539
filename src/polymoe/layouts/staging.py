"""Helpers shared by layouts: upload experts to the device, and stack their tensors over experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from polymoe.common.shapes import round_up
from polymoe.errors import PlanError
from polymoe.formats import QuantTensor
from polymoe.layouts.base import Packed
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights

if TYPE_CHECKING:
    from torch import Tensor

_UNDER_WAY = 2
"""Most experts, or blocks of experts, whose copies to a GPU are pending at once; limits pinned memory."""

_BLOCK_BYTES = 64 << 20
"""Size of the experts that are packed at once on a GPU, where each launch costs the host as long as a megabyte takes.
Temporary memory is up to five times as much."""

_IN_BLOCKS = ("cuda",)
"""Types of devices on which layouts pack several experts at once."""

INPUT_SCALES = frozenset({"gate_up_input_scale", "down_input_scale"})
"""Experts that received no token in calibration lack these; their entries in a stack are NaN."""

_ALIGNMENT = 256
"""Bytes, as of the memory that torch allocates: kernels read aligned vectors."""


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made within, also under the caller's inference mode, can be overwritten later and have no gradient, also
    where a part of an expert is a Parameter."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class PartOffsets:
    """Where the parts of an expert begin in one buffer, which is the same for all experts of a layer.

    Attributes:
        nbytes: size of the buffer.
    """

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, int], int] = {}
        self.nbytes = 0

    def of(self, name: str, nbytes: int) -> int:
        """Return the offset in bytes of the part of this name and size. A part that is new is put at the end."""
        key = name, round_up(nbytes, _ALIGNMENT)
        if key not in self._offsets:
            self._offsets[key] = self.nbytes
            self.nbytes += key[1]
        return self._offsets[key]


def staged(
    weights: ExpertWeights,
    device: torch.device,
    arrived: Callable[[int, Expert, Tensor | None], None] | None = None,
    offsets: PartOffsets | None = None,
    arrived_together: Callable[[int, Mapping[str, Tensor], Tensor], None] | None = None,
) -> ExpertWeights:
    """Return the same experts on ``device``, each copied there when it is read. On a CPU they are those of ``weights``.

    Copies to a GPU are asynchronous and from pinned memory, so that reading one expert overlaps with copying others.

    Args:
        weights: the experts, on any device.
        device: where they are needed.
        arrived: called with the number of each expert that is read, the expert on ``device``, and the buffer that holds
            its parts, uint8 with zeros between them; None if each part has memory of its own.
        offsets: where the parts are in a buffer; by default those of the first expert, one after the other.
        arrived_together: the same for experts that are read by ``read_stacked``, which there is on a GPU: called with
            the number of the first, their parts as ``read_stacked`` returns them, and the buffers, uint8 [n, bytes].
    """
    under_way: deque[torch.Event] = deque()
    places = offsets or PartOffsets()

    def read(e: int) -> Expert:
        expert, buffer = weights.read(e), None
        if device.type == "cuda":
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().synchronize()
            expert, buffer = _sent(expert, device, places)
            under_way.append(torch.cuda.current_stream(device).record_event())
        if arrived is not None:
            arrived(e, expert, buffer)
        return expert

    def read_stacked(first: int, last: int) -> dict[str, Tensor]:
        if device.type == "cuda" and len(under_way) == _UNDER_WAY:
            under_way.popleft().synchronize()
        experts: list[Expert] = []
        stacks = weights.stacks or {}
        if stacks and all(stack.device.type == device.type for stack in stacks.values()):
            some = {name: stack[first:last] for name, stack in stacks.items()}
            buffer = _gathered(some, device, places)
            kinds = {name: part[0] for name, part in some.items()}
        else:
            experts = [weights.read(e) for e in range(first, last)]
            buffer = _sent_together(experts, device, places, first)
            kinds = {name: part for expert in experts for name, part in expert.parts().items()}
        if device.type == "cuda":
            under_way.append(torch.cuda.current_stream(device).record_event())
        found = _stacked_in(buffer, kinds, places)
        if arrived_together is not None:
            arrived_together(first, found, buffer)
        return _without_missing(found, experts)

    return replace(weights, read=read, read_stacked=read_stacked if device.type in _IN_BLOCKS else None)


def kept(weights: ExpertWeights) -> ExpertWeights:
    """Return the same experts. Views of files are kept from :meth:`ExpertWeights.peek` until the expert is read next.

    To look up the tensors of an expert takes a quarter of a millisecond, as long as to pack one on a GPU.
    """
    read, views = weights.read_unchecked, dict[int, Expert]()
    if read is None:
        return weights

    def once(e: int) -> Expert:
        if e in views:
            return views.pop(e)
        views[e] = expert = read(e)
        return expert

    return replace(weights, read_unchecked=once)


def uploaded(weights: ExpertWeights, device: torch.device) -> Iterator[Expert]:
    """Yield the experts on ``device``, as :func:`staged` does.

    When the iterator ends, torch's current stream has been synchronized.
    """
    yield from staged(weights, device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _sent(expert: Expert, device: torch.device, offsets: PartOffsets) -> tuple[Expert, Tensor | None]:
    """Start to copy an expert to a GPU: in one piece if it is on the CPU, since each copy costs time on the host."""
    if not all(part.is_cpu for part in expert.parts().values()):
        return expert.to(device), None
    # Torch's allocator does not reuse pinned memory before pending copies from it have finished.
    buffer = in_buffer(expert, offsets, pin_memory=True).to(device, non_blocking=True)
    return of_buffer(buffer, expert, offsets), buffer


def _sent_together(experts: Sequence[Expert], device: torch.device, offsets: PartOffsets, first: int) -> Tensor:
    """Start to copy experts to a device; return uint8 [experts, bytes] with their parts at their offsets.

    Raises:
        PlanError: if one has other parts than the first; only input scales may be missing.
    """
    kinds = [{name: (part.dtype, part.shape) for name, part in expert.parts().items()} for expert in experts]
    for e, kind in enumerate(kinds):
        odd = {name for name, _ in kind.items() ^ kinds[0].items()} - (INPUT_SCALES - (kind.keys() & kinds[0].keys()))
        if odd:
            got = ", ".join(f"{n} {kind[n][0] if n in kind else 'absent'}" for n in sorted(odd))
            raise PlanError(f"expert {first + e}", expected=f"the same tensors as expert {first}", got=got)
        for name, part in experts[e].parts().items():
            offsets.of(name, part.nbytes)
    shape = len(experts), offsets.nbytes
    if all(part.is_cpu for expert in experts for part in expert.parts().values()):
        on_gpu = device.type == "cuda"
        buffers = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        for expert, buffer in zip(experts, buffers, strict=True):
            in_buffer(expert, offsets, buffer)
        return buffers.to(device, non_blocking=True)
    buffers = torch.zeros(shape, dtype=torch.uint8, device=device)
    places: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for expert, buffer in zip(experts, buffers, strict=True):
        for name, part in expert.parts().items():
            plain = part.view(torch.uint8) if part.dtype.itemsize == 1 else part  # not of 8-bit floats
            to, source = places.setdefault(plain.dtype, ([], []))
            to.append(_at(buffer, offsets.of(name, part.nbytes), plain))
            source.append(plain)
    for to, source in places.values():  # one launch for many copies
        torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]
    return buffers


def _gathered(some: Mapping[str, Tensor], device: torch.device, offsets: PartOffsets) -> Tensor:
    """Return uint8 [experts, bytes] with the parts of some experts, each [experts, ...], at their offsets."""
    for name, part in some.items():
        offsets.of(name, part[0].nbytes)
    buffers = torch.zeros(len(next(iter(some.values()))), offsets.nbytes, dtype=torch.uint8, device=device)
    for name, part in _stacked_in(buffers, {name: part[0] for name, part in some.items()}, offsets).items():
        to, source = wide(part, some[name])
        to.copy_(source)
    return buffers


def wide(*tensors: Tensor) -> list[Tensor]:
    """Return views of tensors of one dtype and shape as the widest integers that all allow: a GPU copies an element of
    eight bytes in the time of one of one byte."""
    if not tensors[0].dim():
        return list(tensors)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if all(_can_be(tensor, dtype.itemsize) for tensor in tensors):
            return [tensor.view(dtype) for tensor in tensors]
    return list(tensors)


def _can_be(tensor: Tensor, itemsize: int) -> bool:
    """Whether rows of a tensor consist of whole aligned words."""
    size = tensor.element_size()
    places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and size <= itemsize and all(place * size % itemsize == 0 for place in places)


def _stacked_in(buffers: Tensor, parts: Mapping[str, Tensor], offsets: PartOffsets) -> dict[str, Tensor]:
    """Return views of the parts of some experts in ``buffers``, each [experts, ...]; those of one expert are given."""
    found = {}
    for name, part in parts.items():
        begin = offsets.of(name, part.nbytes)
        found[name] = buffers[:, begin : begin + part.nbytes].view(part.dtype).view(len(buffers), *part.shape)
    return found


def _without_missing(found: dict[str, Tensor], experts: Sequence[Expert]) -> dict[str, Tensor]:
    """Return ``found`` with NaN for input scales that an expert lacks."""
    for name in INPUT_SCALES & found.keys():
        lacking = [i for i, expert in enumerate(experts) if name not in expert.parts()]
        if lacking:
            found[name] = found[name].clone()
            found[name][lacking] = float("nan")
    return found


def in_buffer(expert: Expert, offsets: PartOffsets, out: Tensor | None = None, *, pin_memory: bool = False) -> Tensor:
    """Return an expert's parts at their offsets in one buffer on the CPU, uint8 with zeros between them.

    Args:
        expert: on the CPU.
        offsets: where its parts are.
        out: the buffer; None for a new one.
        pin_memory: of a new one.
    """
    parts = {offsets.of(name, part.nbytes): part for name, part in expert.parts().items()}
    buffer = torch.empty(offsets.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory) if out is None else out
    end = 0
    for first, part in sorted(parts.items()):
        if end < first:
            buffer[end:first] = 0
        end = first + part.nbytes
        _at(buffer, first, part).copy_(part)
    if end < len(buffer):
        buffer[end:] = 0
    return buffer


def of_buffer(buffer: Tensor, expert: Expert, offsets: PartOffsets) -> Expert:
    """Return the expert with views of ``buffer`` in place of its parts: the inverse of :func:`in_buffer`."""
    parts = iter([_at(buffer, offsets.of(n, part.nbytes), part) for n, part in expert.parts().items()])
    return expert.map(lambda _: next(parts))


def _at(buffer: Tensor, first: int, like: Tensor) -> Tensor:
    return buffer[first : first + like.nbytes].view(like.dtype).view(like.shape)


def pack_stacks(
    weights: ExpertWeights,
    device: torch.device,
    out: Packed | None,
    parts: Callable[[int, Expert], Mapping[str, Tensor]],
    together: Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a packed layer, stacked over its experts: each [E, ...]. Experts are read one at a time, or
    on a GPU some at once.

    Args:
        weights: the experts.
        device: where the tensors are.
        out: a packed layer whose tensors are overwritten in place, but for those that its layout derives from all
            experts; None for new ones.
        parts: gives the tensors of an expert on ``device``, by name; called with its number and the expert.
        together: gives those of several experts, each [n, ...]; called with the number of the first, and with their
            parts, each [n, ...]. None where a layout packs one at a time.

    Raises:
        PlanError: if ``out`` holds experts of another spec, or an expert has other tensors than those before it.
    """
    if out is not None and out.spec != weights.spec:
        raise PlanError("update", expected=str(out.spec), got=str(weights.spec), hint="load these experts again")
    stacks = {} if out is None else {n: t for n, t in out.tensors.items() if not n.startswith("kernel.")}
    count = weights.spec.local_experts
    arriving = weights if weights.read_stacked is not None else staged(weights, device)
    if together is not None and device.type in _IN_BLOCKS and arriving.read_stacked is not None:
        size = max(1, _BLOCK_BYTES // weights.spec.expert_bytes)
        for first in range(0, count, size):
            some = {n: p.to(device) for n, p in arriving.read_stacked(first, min(first + size, count)).items()}
            _store(stacks, together(first, some), first, count, device, fresh=out is None)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return stacks
    for e, expert in enumerate(uploaded(weights, device)):
        made = {name: part[None] for name, part in parts(e, expert).items()}
        _store(stacks, made, e, count, device, fresh=out is None)
    return stacks


def unchanged(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what layouts leave as it is: global scales, biases and input scales, by the names of
    :meth:`Expert.parts`."""
    return {name: t for name, t in parts.items() if name.endswith(".global_scale") or "." not in name}


def projections_of(spec: ExpertsSpec, parts: Mapping[str, Tensor]) -> dict[str, QuantTensor]:
    """Return the matrices, or stacks of them, whose parts have the names of :meth:`Expert.parts`."""
    return {
        projection: QuantTensor(
            encoding=encoding,
            **{name.partition(".")[2]: part for name, part in parts.items() if name.startswith(f"{projection}.")},
        )
        for projection, encoding in spec.encodings.items()
    }


def _store(
    stacks: dict[str, Tensor], parts: Mapping[str, Tensor], e: int, count: int, device: torch.device, *, fresh: bool
) -> None:
    """Copy the tensors of some experts, each [n, ...], from expert ``e`` on into ``stacks``, each [count, ...].

    With ``fresh``, the stacks are allocated on ``device`` for the first expert that has them.

    Raises:
        PlanError: if the experts' tensors have other names or dtypes than those of the experts before them.
    """
    last = e + len(next(iter(parts.values())))
    for name, part in parts.items() if fresh else ():
        if name not in stacks and (e == 0 or name in INPUT_SCALES):
            stacks[name] = torch.empty((count, *part.shape[1:]), dtype=part.dtype, device=device)
            if e:  # the experts before this one had none
                stacks[name][:e].fill_(float("nan"))
    odd = (parts.keys() ^ stacks.keys()) - (INPUT_SCALES - parts.keys())
    if odd:
        got = f"a difference in {', '.join(sorted(odd))}"
        raise PlanError(f"expert {e}", expected="the same tensors as expert 0", got=got)
    for name, stack in stacks.items():
        if name in parts:
            if parts[name].dtype != stack.dtype:
                raise PlanError(
                    f"expert {e} {name}",
                    expected=f"{stack.dtype}, as in the experts before it",
                    got=str(parts[name].dtype),
                    hint="convert all to one dtype",
                )
            stack[e:last].copy_(parts[name])
        else:
            stack[e:last].fill_(float("nan"))


def expert_of(spec: ExpertsSpec, parts: Mapping[str, Tensor], e: int) -> Expert:
    """Return expert ``e`` of tensors that are stacked over experts: views by the names of :meth:`Expert.parts`.

    Input scales that :func:`store` filled with NaN are left out.
    """
    mine = {name: part[e] for name, part in parts.items()}
    vectors = {n: t for n, t in mine.items() if "." not in n and not (n in INPUT_SCALES and t.isnan())}
    return Expert(**{"gate": None, **projections_of(spec, mine), **vectors})  # type: ignore[arg-type]
