"""Helpers shared by layouts: upload experts to the device, and store their tensors in stacks over experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polymoe.errors import PlanError
from polymoe.tensors import Expert, ExpertWeights

__all__ = ["drop_absent", "store", "uploaded"]

_UNDER_WAY = 2
"""Most experts whose copies to a GPU are pending at once; limits pinned memory."""

# Experts that received no token in calibration lack these scales; their entries in a stack are NaN.
INPUT_SCALES = frozenset({"gate_up_input_scale", "down_input_scale"})


def uploaded(weights: ExpertWeights, device: torch.device) -> Iterator[Expert]:
    """Yield the experts on ``device``. On a CPU they are yielded as read: views of the files.

    Copies to a GPU are asynchronous and from pinned memory, so that reading one expert overlaps with copying others.
    When the iterator ends, torch's current stream has been synchronized.
    """
    if device.type != "cuda":
        yield from weights
        return
    stream = torch.cuda.current_stream(device)
    under_way: deque[torch.Event] = deque()
    for expert in weights:
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().synchronize()
        there = expert.map(lambda part: _sent(part, device))
        under_way.append(stream.record_event())
        yield there
    stream.synchronize()


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
