"""Helpers shared by layouts: upload experts to the device, and store their tensors in stacks over experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from polymoe.errors import PlanError
from polymoe.tensors import Expert, ExpertWeights

__all__ = ["drop_absent", "kept", "staged", "store", "uploaded"]

_UNDER_WAY = 2
"""Most experts whose copies to a GPU are pending at once; limits pinned memory."""

# Experts that received no token in calibration lack these scales; their entries in a stack are NaN.
INPUT_SCALES = frozenset({"gate_up_input_scale", "down_input_scale"})


def staged(
    weights: ExpertWeights, device: torch.device, arrived: Callable[[int, Expert], None] | None = None
) -> ExpertWeights:
    """Return the same experts on ``device``, each copied there when it is read. On a CPU they are those of ``weights``.

    Copies to a GPU are asynchronous and from pinned memory, so that reading one expert overlaps with copying others.

    Args:
        weights: the experts, on any device.
        device: where they are needed.
        arrived: called with the number of each expert that is read and with the expert on ``device``.
    """
    under_way: deque[torch.Event] = deque()

    def read(e: int) -> Expert:
        expert = weights.read(e)
        if device.type == "cuda":
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().synchronize()
            expert = expert.map(lambda part: _sent(part, device))
            under_way.append(torch.cuda.current_stream(device).record_event())
        if arrived is not None:
            arrived(e, expert)
        return expert

    return replace(weights, read=read, read_several=None)


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


def _sent(part: Tensor, device: torch.device) -> Tensor:
    if part.device.type == "cpu":
        # Torch's allocator does not reuse pinned memory before pending copies from it have finished.
        part = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
    return part.to(device, non_blocking=True)


def store(
    stacks: dict[str, Tensor], parts: Mapping[str, Tensor], e: int, count: int, device: torch.device, *, fresh: bool
) -> None:
    """Copy the tensors of expert ``e`` into ``stacks``, each [count, ...].

    With ``fresh``, the stacks are allocated on ``device`` for the first expert that has them.

    Raises:
        PlanError: if the expert's tensors have other names than those of the experts before it.
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
            stack[e].copy_(parts[name])
        else:
            stack[e].fill_(float("nan"))


def drop_absent(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one expert's vectors without the input scales that :func:`store` filled with NaN."""
    return {n: t for n, t in parts.items() if not (n in INPUT_SCALES and t.isnan())}
