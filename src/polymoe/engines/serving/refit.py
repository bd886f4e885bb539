"""Weights in 16 bits that a trainer sends to an engine whose experts are quantized: layer by layer, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polymoe.common.units import first_few
from polymoe.engines.serving.take_over import TakenOver
from polymoe.errors import UnsupportedProblem

__all__ = ["require_whole_model"]


def require_whole_model(pending: set[TakenOver], modules: Iterable[Any]) -> None:
    """Check, before a model runs, that all of its layers have the weights of the same update in 16 bits.

    A CUDA graph computes with whatever the tensors hold, so that the layers themselves cannot refuse.

    Args:
        pending: layers whose update has begun since the last check.
        modules: of the model.

    Raises:
        UnsupportedProblem: if an update has not ended, of a layer or of the model; the message names what is missing.
    """
    if not pending:
        return
    found = [getattr(module, "quant_method", None) for module in modules]
    methods = [method for method in found if isinstance(method, TakenOver)]
    newest = max((method.refits for method in methods), default=0)
    behind = [method for method in methods if method.stale or method.refits < newest]
    if behind:
        parts = [part for method in behind if method.incoming is not None for part in method.incoming.missing()]
        raise UnsupportedProblem(
            first_few([method.packed.where for method in behind]),
            expected="new weights of all layers before the next request",
            got=f"none for {first_few(parts)}" if parts else "none, or an update that failed",
            hint="pause generation until the last tensor was sent; send all of the model's tensors again",
        )
    pending.clear()
