"""Updates: which layers of an engine have new weights, so that a model never runs on a mixture.

Trainers send weights in 16 bits to engines whose experts are quantized, layer by layer. A CUDA graph computes with
whatever the tensors hold, so that a layer itself cannot refuse to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polymoe.common.units import first_few
from polymoe.errors import UnsupportedProblem


class Updates:
    """The updates of all layers of a process, which may be of several models.

    Attributes:
        pending: methods (``TakenOver``) of layers whose update in 16 bits has begun since their model was checked.
    """

    def __init__(self) -> None:
        self.pending: set[Any] = set()
        self._pass = 0

    def end(self, method: Any) -> None:
        """Note that all of the layer of ``method`` is new, from weights of whatever dtype.

        Layers of the same pass over the model get the same number. A layer that ends a second time is in the next pass.
        """
        if method.updated == self._pass:
            self._pass += 1
        method.updated = self._pass

    def require_whole(self, modules: Iterable[Any]) -> None:
        """Check, before a model of these ``modules`` runs, that all of its layers have the weights of the same pass.

        Raises:
            UnsupportedProblem: if an update has not ended, of a layer or of the model; the message names what is
                missing.
        """
        if not self.pending:
            self._pass += 1  # a layer's next update is not part of an earlier pass
            return
        found = (getattr(module, "quant_method", None) for module in modules)
        methods: list[Any] = [method for method in found if getattr(method, "updates", None) is self]
        if self.pending.isdisjoint(methods):
            return
        newest = max(method.updated for method in methods)
        behind = [method for method in methods if method.stale or method.early or method.updated < newest]
        if behind:
            parts = [part for method in behind if method.incoming is not None for part in method.incoming.missing()]
            raise UnsupportedProblem(
                first_few([method.packed.where for method in behind]),
                expected="new weights of all layers before the next request",
                got=f"none for {first_few(parts)}" if parts else "none, or an update that failed",
                hint="pause generation until the last tensor was sent; send all of the model's tensors again",
            )
        self.pending.difference_update(methods)
