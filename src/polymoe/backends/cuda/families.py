"""The table of kernel families: what each reads, how fast it is, and for how many rows it is the fastest.

Sizes of tiles and stages are those of :mod:`polymoe.kernels.cuda.sizes`. Thresholds and rates were fitted to times on
one H200 (``benchmarks/results``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from polymoe.activation_quantization import FP8_GROUP128, UNQUANTIZED, ActivationQuantization
from polymoe.formats import FORMATS, Encoding
from polymoe.kernels.cuda import launch, sizes
from polymoe.problem import Problem

__all__ = ["FAMILIES", "Choice", "KernelFamily", "Rates", "ShorterTiles", "families_for", "format_of"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles that are the fastest up to a mean number of rows per expert that has any.

    Attributes:
        most_rows: the mean up to which they are.
        block_m, block_n: of the tiles.
    """

    most_rows: float
    block_m: int
    block_n: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the kernels are: ``time = memory_us / bandwidth + compute_us / math + fixed_us``.

    Attributes:
        bandwidth, math: shares of the device's memory bandwidth and MMA rate, of which ``memory_us`` and ``compute_us``
            are the whole.
        fixed_us: of the launches.
        l2_math: share of the MMA rate that the L2 cache can feed, where every work tile reads its weights from there
            undecoded; 0 where that is no limit.
    """

    bandwidth: float
    math: float
    fixed_us: float
    l2_math: float = 0.0

    def time_us(self, memory_us: float, compute_us: float) -> float:
        """Of one call."""
        time_us = memory_us / self.bandwidth + compute_us / self.math
        if self.l2_math:
            time_us = max(time_us, compute_us / self.l2_math)
        return time_us + self.fixed_us


@dataclass(frozen=True, slots=True)
class ShorterTiles:
    """Kernels for more rows of x whose tiles have fewer rows of weights: sometimes their last wave is less empty.

    Attributes:
        block_m: of the kernel to be replaced.
        instead: ``block_m`` of the other.
        cost: the other's time for the same rows of weights, as a multiple.
    """

    block_m: int
    instead: int
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class KernelFamily:
    """Kernels that compute in the same way.

    Attributes:
        sizes: their formats, tiles and pipelines.
        activations: how x and h may be quantized.
        layout: in which they read weights.
        call: what launches them.
        choices: tiles by rows per expert, ascending. Families of the same weights share the range in the order of the
            table; beyond all of them, the last family's largest tile serves.
        rates: of the cost model.
        batch_invariant: whether a token's result is bitwise identical in any batch and with any of the family's tiles.
        gated_only: whether experts must have a gate.
        output_weight_only: whether router weights must multiply the output.
        wider_down: whether the down projection may run with a larger ``block_m``.
        shorter: tiles to take where they fill the SMs better, or None.
        check_tokens: tokens of the call that a layer is checked with at load.
        architectures: compute capabilities that the kernels are compiled for.
    """

    sizes: sizes.FamilySizes
    activations: tuple[ActivationQuantization, ...]
    layout: str
    call: type[launch.Call]
    choices: tuple[Choice, ...]
    rates: Rates
    batch_invariant: bool = True
    gated_only: bool = False
    output_weight_only: bool = False
    wider_down: bool = False
    shorter: ShorterTiles | None = None
    check_tokens: int = 8
    architectures: tuple[tuple[int, int], ...] = ((9, 0),)

    @property
    def name(self) -> str:
        """In configurations, tables and the names of kernels."""
        return self.sizes.name

    @property
    def formats(self) -> tuple[str, ...]:
        """Of the weights, as in ``FORMATS``."""
        return tuple(self.sizes.formats)


_INF = float("inf")
_ALL = (
    # 1 to 128 tokens of DeepSeek-V4-Flash in MXFP4 have up to 3.2 rows per expert. K is split between warps, so sums
    # have another order than in w4a16_wgmma.
    KernelFamily(
        sizes.W4A16_MMA, (UNQUANTIZED,), "w4a16_fragments", launch.MmaCall,
        (Choice(4.4, 8, 64),), Rates(0.93, 0.45, 10.0), batch_invariant=False,
    ),
    # 256 to 1024 tokens (6 to 24 rows), 2048 (48), 4096 (96), and beyond. A row's sum is one accumulator that adds K in
    # order, 16 columns at a time, whatever the tile. `shorter`: at most that for DeepSeek-V4-Flash and Kimi K2 TP8 at
    # 256 and 512 tokens.
    KernelFamily(
        sizes.W4A16_WGMMA, (UNQUANTIZED,), "w4a16_fragments", launch.TiledCall,
        (Choice(29.0, 32), Choice(62.0, 64), Choice(115.0, 128), Choice(_INF, 256)), Rates(1.02, 0.95, 20.0),
        wider_down=True, shorter=ShorterTiles(32, 64, 1.2),
    ),
    # 1 to 256 tokens of DeepSeek-V4-Flash (up to 6 rows), 512 and 1024 (24), 2048 (48), and beyond.
    KernelFamily(
        sizes.W4A8, (FP8_GROUP128,), "w4a8_fragments", launch.QuantizedTilesCall,
        (Choice(8.0, 16), Choice(29.0, 32), Choice(62.0, 64), Choice(_INF, 128)), Rates(1.02, 0.65, 20.0),
        gated_only=True, output_weight_only=True, wider_down=True,
    ),
    # 1 to 4096 tokens of Qwen3-235B TP4 (up to 256 rows).
    KernelFamily(
        sizes.BF16, (UNQUANTIZED,), "w16_swizzle128", launch.TiledCall,
        (Choice(20.0, 32), Choice(45.0, 64), Choice(90.0, 128), Choice(_INF, 256)),
        Rates(1.02, 1.0, 12.0, l2_math=0.38), wider_down=True,
    ),
    # 1 to 512 tokens of DeepSeek-V3 TP8 (up to 16 rows), 1024 (32). Sums of float16 products are exact enough to be the
    # same in any tile.
    KernelFamily(
        sizes.W8A8_F16, (FP8_GROUP128,), "w8_fragments", launch.E4M3RowsCall,
        (Choice(20.0, 32), Choice(50.0, 64)), Rates(0.98, 0.5, 14.0), gated_only=True, output_weight_only=True,
    ),
    # Beyond. E4M3's own sums have 14 bits: single tokens are up to 4e-2 off, and 512 together never 6e-3.
    KernelFamily(
        sizes.W8A8, (FP8_GROUP128,), "w8_fragments", launch.E4M3TilesCall,
        (Choice(_INF, 160),), Rates(1.02, 0.45, 14.0), batch_invariant=False, gated_only=True, output_weight_only=True,
        check_tokens=512,
    ),
)  # fmt: skip

FAMILIES: dict[str, KernelFamily] = {family.name: family for family in _ALL}
"""Kernel families by name. Those that read the same weights stand in the order of the rows per expert."""


@cache
def format_of(encoding: Encoding) -> str | None:
    """Which of the kernels' formats it is, or None. A global scale per expert is always optional, and scales of 8-bit
    weights may have any dtype, because their layout converts them."""
    for name in dict.fromkeys(name for family in _ALL for name in family.formats):
        own = FORMATS[name].encoding
        same = (own.element, own.granularity, own.zero_points) == (
            encoding.element,
            encoding.granularity,
            encoding.zero_points,
        )
        if same and (own.scale_dtype == encoding.scale_dtype or own.bits == 8):
            return name
    return None


def families_for(problem: Problem) -> list[KernelFamily]:
    """Families that read all of the problem's weights, with its activations, in the order of the table."""
    formats = {format_of(encoding) for encoding in problem.spec.encodings.values()}
    return [f for f in FAMILIES.values() if problem.activations in f.activations and formats <= set(f.formats)]
