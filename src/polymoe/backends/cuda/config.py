"""CudaConfig: which kernels a call runs, and the sizes of their tiles."""

from __future__ import annotations

from dataclasses import dataclass

from polymoe.backends.config import Config
from polymoe.backends.cuda.families import activations_of
from polymoe.errors import PlanError, nearest
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, KernelFamily


@dataclass(frozen=True, slots=True)
class CudaConfig(Config):
    """Which kernels a call runs.

    Attributes:
        family: the kernel family, a name in ``KERNEL_FAMILIES``.
        block_m: most rows of x in a work tile.
        block_n: 64 for w4a16_mma, else 0.
        down_block_m: ``block_m`` of the kernel for the down projection if it differs, else 0. Work tiles are the same.
        narrow_m: ``block_m`` of the kernels for the work tiles of at most so many rows, which have launches of their
            own; 0 if there are none.

    Raises:
        PlanError: if no kernel has these sizes. A table of measured times may be older than the kernels.
    """

    family: str
    block_m: int
    block_n: int = 0
    down_block_m: int = 0
    narrow_m: int = 0

    def __post_init__(self) -> None:
        known = KERNEL_FAMILIES.get(self.family)
        if known is None:
            raise PlanError("CudaConfig.family", got=repr(self.family), hint=nearest(self.family, KERNEL_FAMILIES))
        wider = [block_m for block_m in known.tiles if block_m > self.block_m and known.wider_down]
        narrower = [narrow_m for block_m, narrow_m in known.narrow if block_m == self.block_m and not self.down_block_m]
        for name, kind, choices in (
            ("block_m", f"block_m of a {self.family} kernel", known.tiles),
            ("block_n", f"block_n of a {self.family} kernel", known.block_ns or (0,)),
            ("down_block_m", f"0 or a larger block_m of a {self.family} kernel", (0, *wider)),
            ("narrow_m", f"narrow_m beside block_m {self.block_m}", (0, *narrower)),
        ):
            if (value := getattr(self, name)) not in choices:
                expected = f"{kind}: {', '.join(map(str, choices))}"
                raise PlanError(f"CudaConfig.{name}", expected=expected, got=str(value))

    @property
    def kernels(self) -> KernelFamily:
        """The family's row in ``KERNEL_FAMILIES``."""
        return KERNEL_FAMILIES[self.family]

    @property
    def kernel_family(self) -> str:
        return self.family

    @property
    def fast_accumulation(self) -> bool:
        return any(mode.fast_accumulation for mode in activations_of(self.kernels))

    @property
    def check_tokens(self) -> int:
        return self.kernels.check_tokens

    def __str__(self) -> str:
        sizes = (("block_n", self.block_n), ("down_block_m", self.down_block_m), ("narrow_m", self.narrow_m))
        return ", ".join([f"{self.family}, block_m {self.block_m}", *(f"{n} {size}" for n, size in sizes if size)])
