"""Experts to the device, one expert's tensors into stacks over experts: what layouts share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polymoe.errors import PlanError
from polymoe.tensors import Expert, ExpertWeights

__all__ = ["drop_absent", "store", "uploaded"]

_UNDER_WAY = 2
"""Experts whose copies to a GPU need not have ended before another is read: bounds pinned memory."""

# Calibration leaves experts that no token reached without these: NaN stands in their place.
INPUT_SCALES = frozenset({"gate_up_input_scale", "down_input_scale"})


def uploaded(weights: ExpertWeights, device: torch.device) -> Iterator[Expert]:
    """The experts in turn, on a GPU ``device``; on a CPU as they are read, which is as views of files.

    They travel from pinned memory, so that one is read while those before it are under way. When the last has been
    taken, the device has done all work that was given to torch's current stream.
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
        # Torch's allocator of pinned memory waits for copies from it before it gives it out again.
        part = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
    return part.to(device, non_blocking=True)


def store(
    stacks: dict[str, Tensor], parts: Mapping[str, Tensor], e: int, count: int, device: torch.device, *, fresh: bool
) -> None:
    """Copy expert ``e``'s ``parts`` into ``stacks`` [count, ...]; ``fresh`` ones are made with the first expert.

    Raises:
        PlanError: if the expert has other tensors than those before it.
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
    """One expert's vectors without the input scales that it never had."""
    return {n: t for n, t in parts.items() if not (n in INPUT_SCALES and t.isnan())}
