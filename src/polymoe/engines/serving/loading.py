"""LoadedParts: which parts of a layer's tensors an engine has loaded. Engines do not notice when a part is missing."""

from __future__ import annotations

from torch import Tensor

from polymoe.engines.serving.sources import StackedExperts
from polymoe.errors import CheckpointError

_WHOLE = ("", -1)


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
