"""Helpers shared by layouts: upload experts to the device, and stack their tensors over experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
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

__all__ = [
    "INPUT_SCALES",
    "PartOffsets",
    "expert_of",
    "in_buffer",
    "kept",
    "of_buffer",
    "ordinary_tensors",
    "pack_stacks",
    "staged",
    "unchanged",
    "unchanged_parts",
    "uploaded",
]

_UNDER_WAY = 2
"""Most experts whose copies to a GPU are pending at once; limits pinned memory."""

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
) -> ExpertWeights:
    """Return the same experts on ``device``, each copied there when it is read. On a CPU they are those of ``weights``.

    Copies to a GPU are asynchronous and from pinned memory, so that reading one expert overlaps with copying others.

    Args:
        weights: the experts, on any device.
        device: where they are needed.
        arrived: called with the number of each expert that is read, the expert on ``device``, and the buffer that holds
            its parts, uint8 with zeros between them; None if each part has memory of its own.
        offsets: where the parts are in a buffer; by default those of the first expert, one after the other.
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

    return replace(weights, read=read, read_stacked=None)


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


def in_buffer(expert: Expert, offsets: PartOffsets, *, pin_memory: bool = False) -> Tensor:
    """Return an expert's parts at their offsets in one buffer on the CPU, uint8 with zeros between them."""
    parts = {offsets.of(name, part.nbytes): part for name, part in expert.parts().items()}
    buffer = torch.empty(offsets.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
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
) -> dict[str, Tensor]:
    """Return the tensors of a packed layer, stacked over its experts: each [E, ...]. Experts are read one at a time.

    Args:
        weights: the experts.
        device: where the tensors are.
        out: a packed layer whose tensors are overwritten in place, but for those that its layout derives from all
            experts; None for new ones.
        parts: gives the tensors of an expert on ``device``, by name; called with its number and the expert.

    Raises:
        PlanError: if ``out`` holds experts of another spec, or an expert has other tensors than those before it.
    """
    if out is not None and out.spec != weights.spec:
        raise PlanError("update", expected=str(out.spec), got=str(weights.spec), hint="load these experts again")
    stacks = {} if out is None else {n: t for n, t in out.tensors.items() if not n.startswith("kernel.")}
    for e, expert in enumerate(uploaded(weights, device)):
        _store(stacks, parts(e, expert), e, weights.spec.local_experts, device, fresh=out is None)
    return stacks


def unchanged_parts(expert: Expert) -> dict[str, Tensor]:
    """Return what layouts leave as it is: global scales, biases and input scales, by the names of
    :meth:`Expert.parts`."""
    return unchanged(expert.parts())


def unchanged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of packed tensors that :func:`unchanged_parts` gave."""
    return {name: t for name, t in tensors.items() if name.endswith(".global_scale") or "." not in name}


def _store(
    stacks: dict[str, Tensor], parts: Mapping[str, Tensor], e: int, count: int, device: torch.device, *, fresh: bool
) -> None:
    """Copy the tensors of expert ``e`` into ``stacks``, each [count, ...].

    With ``fresh``, the stacks are allocated on ``device`` for the first expert that has them.

    Raises:
        PlanError: if the expert's tensors have other names or dtypes than those of the experts before it.
    """
    for name, part in parts.items() if fresh else ():
        if name not in stacks and (e == 0 or name in INPUT_SCALES):
            stacks[name] = torch.empty((count, *part.shape), dtype=part.dtype, device=device)
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
            stack[e].copy_(parts[name])
        else:
            stack[e].fill_(float("nan"))


def expert_of(spec: ExpertsSpec, parts: Mapping[str, Tensor], e: int) -> Expert:
    """Return expert ``e`` of tensors that are stacked over experts: views by the names of :meth:`Expert.parts`.

    Input scales that :func:`store` filled with NaN are left out.
    """
    mine = {name: part[e] for name, part in parts.items()}
    projections = {
        projection: QuantTensor(
            encoding=encoding,
            **{name.partition(".")[2]: part for name, part in mine.items() if name.startswith(f"{projection}.")},
        )
        for projection, encoding in spec.encodings.items()
    }
    vectors = {n: t for n, t in mine.items() if "." not in n and not (n in INPUT_SCALES and t.isnan())}
    return Expert(**{"gate": None, **projections, **vectors})  # type: ignore[arg-type]
