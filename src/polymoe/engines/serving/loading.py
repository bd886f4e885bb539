"""What an engine loads into a layer's tensors: which parts, as engines do not notice a missing one; or dummies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymoe.engines.serving.sources import StackedExperts
from polymoe.errors import CheckpointError

_WHOLE = ("", -1)
_DUMMY_SCALE, _DUMMY_E8M0 = 2.0**-7, 120  # the same


class LoadedParts:
    """What was loaded of the tensors of ``experts`` that are read: shards w1, w2 and w3 of each expert."""

    def __init__(self, experts: StackedExperts) -> None:
        self._experts = experts
        self._loaded: dict[str, set[tuple[str, int]]] = {name: set() for name in experts.names}

    def note(self, name: str, loaded_weight: Tensor, shard: str | None, expert: int | None) -> bool:
        """Note that ``loaded_weight`` was loaded into the tensor called ``name``; return whether it was not before.

        Args:
            name: of a stacked tensor that is read.
            loaded_weight: of one expert, or [E, ...] of all.
            shard: "w1", "w2" or "w3"; "w13" or None for all of the tensor's.
            expert: a number, such as the place on this rank; None for all.
        """
        if shard in (None, "w13") or expert is None:
            parts = {_WHOLE}
        elif loaded_weight.dim() == 3:
            parts = {(str(shard), e) for e in range(self._experts.count)}
        else:
            parts = {(str(shard), expert)}
        new = not parts <= self._loaded[name]
        self._loaded[name] |= parts
        return new

    def forget(self, name: str) -> None:
        """Start again with the tensor called ``name``."""
        self._loaded[name].clear()

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of tensors of which parts were not loaded."""
        return tuple(name for name, parts in self._loaded.items() if len(parts) < self._parts(name))

    def require_all(self) -> None:
        """Raise CheckpointError if a part is missing; the message names the tensors."""
        if self.missing:
            found = [f"{len(self._loaded[name])} of {self._parts(name)} parts" for name in self.missing]
            raise CheckpointError(
                f"{self._experts.where}: {', '.join(self.missing)}",
                expected="all experts on this rank, loaded",
                got=", ".join(found),
                hint="the checkpoint lacks tensors of some experts: fetch it again",
            )

    def _parts(self, name: str) -> int:
        if _WHOLE in self._loaded[name]:
            return 1
        return (2 if name.startswith("w13") and self._experts.gated else 1) * self._experts.count


def load_nothing(*_: Any, return_success: bool = False, **__: Any) -> bool | None:
    """The loader of a tensor that is not read, or was created on trial."""
    return True if return_success else None


def fill_dummy(experts: StackedExperts) -> None:
    """Fill the tensors of ``experts`` in place with plausible numbers: random codes, and one scale for all, as unusual
    scales would choose another layout."""
    for name in experts.names:
        tensor = experts.tensors[name]
        if "bias" in name:
            tensor.zero_()
        elif "zero" in name:
            tensor.fill_(0x77777777)  # AWQ's 7; GPTQ's 8, stored minus one
        elif "scale" in name:
            tensor.fill_(_DUMMY_E8M0 if tensor.dtype == torch.uint8 else _DUMMY_SCALE)
        elif tensor.dtype.is_floating_point:
            for expert in tensor:
                expert.copy_(torch.randn(expert.shape, device=expert.device))
        else:
            tensor.view(torch.uint8).random_(0, 256)
