"""FlashInferConfig: which of FlashInfer's kernels a call runs."""

from __future__ import annotations

from dataclasses import dataclass

from polymoe.backends.config import Config


@dataclass(frozen=True, slots=True)
class FlashInferConfig(Config):
    """Which kernels a call runs.

    Attributes:
        route: name of the kernel family: that of the route, or of one of its two.
        up, down: the tactic of each GEMM by name, for routes that have a choice; "" where there is none.
    """

    route: str
    up: str = ""
    down: str = ""

    @property
    def kernel_family(self) -> str:
        return self.route

    @property
    def keeps_16_bits(self) -> bool:
        """Whether x and h stay in 16 bits whatever the problem says: in the families for 16-bit inputs alone."""
        return self.route.endswith("_w4a16")

    def __str__(self) -> str:
        tactics = (("up", self.up), ("down", self.down))
        return ", ".join([self.route, *(f"{name} {tactic}" for name, tactic in tactics if tactic)])
