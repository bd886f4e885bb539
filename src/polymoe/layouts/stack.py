"""One expert's tensors into stacks over experts: what layouts share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polymoe.errors import PlanError

__all__ = ["drop_absent", "store"]

# Calibration leaves experts that no token reached without these: NaN stands in their place.
INPUT_SCALES = frozenset({"gate_up_input_scale", "down_input_scale"})


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
