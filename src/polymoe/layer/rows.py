"""Experts as rows: packed tensors of which each expert has one row, so that any row can hold any expert.

Slots in GPU memory and engines that move experts between ranks copy such rows, and no kernel notices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.errors import UnsupportedProblem
from polymoe.layouts import Packed
from polymoe.planning.selection import Selection
from polymoe.problem.verdict import Reasons

_BACKENDS = ("cuda", "triton", "torch", "reference")
"""Those whose packed tensors are read where they are, and hold nothing of several experts."""


def need_rows(reasons: Reasons, selection: Selection, packed: Packed | None = None) -> None:
    """Add to ``reasons`` why a row cannot hold any expert, if so.

    Args:
        reasons: those found so far.
        selection: of the layer, with a plan.
        packed: its tensors, once it is packed.
    """
    for backend in dict.fromkeys(step.backend for step in selection.require().steps):
        reasons.need(backend in _BACKENDS, "backend", " or ".join(_BACKENDS), backend)
    problem = selection.problem
    single = not problem.activations.global_scale
    reasons.need(single, "activations", "scales that belong to one expert", problem.activations)
    if packed is None:
        return
    for name, tensor in packed.tensors.items():
        whole = tensor.dim() > 0 and len(tensor) == problem.spec.local_experts
        reasons.need(whole, f"{name} in layout {packed.layout}", "a row for each expert", list(tensor.shape))


def require_rows(selection: Selection, packed: Packed, where: str, hint: str) -> None:
    """Refuse experts that are no rows.

    Raises:
        UnsupportedProblem: for ``where``, with every reason and ``hint``.
    """
    reasons = Reasons()
    need_rows(reasons, selection, packed)
    if reasons.found:
        raise UnsupportedProblem(
            where,
            expected="packed tensors with a row for each expert",
            got="; ".join(map(str, reasons.found)),
            hint=hint,
        )


def rows_as_bytes(tensor: Tensor) -> Tensor:
    """A view of contiguous rows as bytes, [rows, bytes of a row]."""
    return tensor.flatten(1).view(torch.uint8) if tensor.dim() > 1 else tensor[:, None].view(torch.uint8)
