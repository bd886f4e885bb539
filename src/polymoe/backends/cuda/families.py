"""The table of kernel families: their weights, their rates, and the numbers of rows for which each is the fastest.

Sizes of tiles and stages are in :mod:`polymoe.kernels.cuda.sizes`. Thresholds and rates were fitted to measurements on
one H200 (``benchmarks/results``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from polymoe.formats import FORMATS, Encoding, PerChannel, PerTensor
from polymoe.kernels.cuda import launch, sizes
from polymoe.kernels.cuda.targets import TARGETS, Target
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import (
    FP8_GROUP128,
    FP8_STATIC,
    FP8_TOKEN,
    UNQUANTIZED,
    ActivationQuantization,
)
from polymoe.problem.tensors import ExpertsSpec

__all__ = ["FAMILIES", "MMA_SYNC_RATES", "Choice", "KernelFamily", "Rates", "ShorterTiles", "families_for", "format_of"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles that are the fastest up to a mean number of rows per expert that has any.

    Attributes:
        most_rows: the largest mean for which these tiles are the fastest.
        block_m, block_n, narrow_m: sizes of the tiles, as in ``CudaConfig``.
        last_rows: in place of ``most_rows`` where no family behind this one may be used; 0 if it is the same.
    """

    most_rows: float
    block_m: int
    block_n: int = 0
    narrow_m: int = 0
    last_rows: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the kernels: ``time = memory_us / bandwidth + compute_us / math + fixed_us``.

    Attributes:
        bandwidth, math: fractions of the device's memory bandwidth and MMA rate that the kernels reach.
        fixed_us: time of the launches, in microseconds.
        l2_math: fraction of the MMA rate that the L2 cache can supply with weights; 0 where it is not a limit.
        rows: rows of an expert for which weights are read and decoded once; 0 where that is not a limit.
        mma_sync: whether ``math`` is a fraction of the rate of ``mma.sync``, which is not every GPU's full rate.
    """

    bandwidth: float
    math: float
    fixed_us: float
    l2_math: float = 0.0
    rows: int = 0
    mma_sync: bool = False

    def time_us(self, memory_us: float, compute_us: float, rows: float) -> float:
        """Return the time of one call, from its times at the full bandwidth and at the full MMA rate, and from the mean
        number of rows of the experts that have any."""
        times = max(1.0, rows / self.rows) if self.rows else 1.0
        time_us = memory_us / self.bandwidth * times + compute_us / self.math
        if self.l2_math:
            time_us = max(time_us, compute_us / self.l2_math)
        return time_us + self.fixed_us


@dataclass(frozen=True, slots=True)
class ShorterTiles:
    """A kernel to replace by one whose tiles have fewer rows of weights, where its last wave is fuller.

    Attributes:
        block_m: ``block_m`` of the kernel to replace.
        instead: ``block_m`` of the replacement.
        cost: time of the replacement for the same rows of weights, relative to the replaced kernel.
    """

    block_m: int
    instead: int
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class KernelFamily:
    """Kernels that compute in the same way.

    Attributes:
        sizes: formats, tiles and pipelines.
        activations: supported quantizations of x and h.
        layout: name of the layout of the weights.
        cvt_layout: its name where a GPU converts the codes of one of the matrices by instructions.
        call: class of the launches.
        choices: tiles by rows per expert, ascending. Of families for the same weights, those for fewer rows come first
            in the table. Beyond all choices, the last family runs with its largest tile.
        rates: rates for the cost model.
        rates_sm80: the same for SM80 to SM89, or None if there are no kernels for them.
        batch_invariant: whether a token's result is bitwise identical in any batch and with any of the family's tiles.
        gated_only: whether experts must have a gate.
        output_weight_only: whether router weights must multiply the output.
        wider_down: whether the down projection may run with a larger ``block_m``.
        narrow: pairs of ``block_m`` and ``narrow_m`` with which work tiles of few rows have launches of their own.
        shorter: replacement tiles for calls where they fill the SMs better, or None.
        fills: fewest tiles of gate and up for each SM with which the family is faster than ``otherwise``.
        otherwise: name of the family that is taken for fewer tiles where it may be used.
        most_fill: most tiles of gate and up for each SM with which the family is faster than those behind it.
        check_tokens: tokens of the call that checks a layer at load.
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
    narrow: tuple[tuple[int, int], ...] = ()
    shorter: ShorterTiles | None = None
    rates_sm80: Rates | None = None
    fills: float = 0.0
    otherwise: str = ""
    most_fill: float = float("inf")
    check_tokens: int = 8
    cvt_layout: str = ""

    @property
    def name(self) -> str:
        """Name in configurations, in tables of measured times and in the names of kernels."""
        return self.sizes.name

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the weight formats, as in ``FORMATS``."""
        return tuple(self.sizes.formats)

    @property
    def architectures(self) -> tuple[tuple[int, int], ...]:
        """Compute capabilities of the GPUs that the kernels are compiled for."""
        return tuple(c for t in TARGETS.values() if self.name in t.families for c in t.capabilities)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of the layouts of the weights on all GPUs."""
        return tuple(filter(None, (self.layout, self.cvt_layout)))

    def layout_on(self, target: Target, spec: ExpertsSpec) -> str:
        """Return the name of the layout of the weights on a target's GPUs."""
        formats = (self.sizes.formats.get(format_of(encoding) or "") for encoding in spec.encodings.values())
        return self.cvt_layout if self.cvt_layout and any(map(target.converts, formats)) else self.layout


MMA_SYNC_RATES = {9: 0.78, 10: 0.34, 12: 1.0}
"""Rate of ``mma.sync`` over the device's, by major compute capability. On an H200 0.62 of the nominal rate; assumed are
as many operations for each clock of an SM100's SM, and an SM120's full rate."""

_INF = float("inf")
_ALL = (
    # Fitted to 1 to 128 tokens of DeepSeek-V4-Flash in MXFP4. With a tile for every other team of warps, 1.9 for an SM,
    # Kimi K2 TP8 is as fast as with w4a16_mma, with half of that slower.
    KernelFamily(
        sizes.W4A16_MMA_ORDERED, (UNQUANTIZED,), "w4a16_fragments", launch.MmaCall,
        (Choice(4.4, 8, 64),), Rates(0.93, 0.32, 9.0, rows=8), fills=1.8, otherwise="w4a16_mma",
    ),
    # Fitted to 1 to 128 tokens of DeepSeek-V4-Flash in MXFP4: up to 3.2 rows per expert. K is split between warps, so
    # that the order of sums differs from w4a16_wgmma. For SM80: as on the H200 with two copy warps.
    KernelFamily(
        sizes.W4A16_MMA, (UNQUANTIZED,), "w4a16_fragments", launch.MmaCall,
        (Choice(4.4, 8, 64),), Rates(0.875, 0.45, 10.0, rows=16), batch_invariant=False,
        rates_sm80=Rates(0.6, 0.45, 14.0, rows=16),
        cvt_layout="w4a16_fragments_cvt",
    ),
    # For GPUs without wgmma, where it never ran. Rates: fitted to 128 to 8192 tokens of DeepSeek-V4-Flash in its 99 KB
    # configuration on an H200. In every tile one accumulator adds K in order, 16 columns at a time, as in w4a16_wgmma.
    KernelFamily(
        sizes.W4A16_MMA_TILED, (UNQUANTIZED,), "w4a16_fragments", launch.TiledCall,
        (Choice(_INF, 96),), Rates(0.85, 0.67, 20.0, mma_sync=True), cvt_layout="w4a16_fragments_cvt",
    ),
    # Fitted to 256 to 1024 tokens (6 to 24 rows), 2048 (48), 4096 (96), and more. In every tile, one accumulator adds K
    # in order, 16 columns at a time. The cost of `shorter` is the largest of DeepSeek-V4-Flash and Kimi K2 TP8 at 256
    # and 512 tokens. Narrow tiles were chosen by times with uniform and with Zipf routing.
    KernelFamily(
        sizes.W4A16_WGMMA, (UNQUANTIZED,), "w4a16_fragments", launch.WgmmaCall,
        (
            Choice(5.7, 32), Choice(29.0, 128, narrow_m=32), Choice(140.0, 128, narrow_m=64),
            Choice(_INF, 256, narrow_m=64),
        ),
        Rates(0.96, 0.95, 20.0), wider_down=True, narrow=((128, 32), (128, 64), (256, 64)),
        shorter=ShorterTiles(32, 64, 1.2),
    ),
    # Fitted to 1 to 256 tokens of DeepSeek-V4-Flash (up to 6 rows), 512 and 1024 (24), 2048 (48), and more.
    KernelFamily(
        sizes.W4A8, (FP8_GROUP128,), "w4a8_fragments", launch.QuantizedTilesCall,
        (Choice(5.0, 16), Choice(7.0, 32), Choice(29.0, 128, narrow_m=32), Choice(_INF, 128, narrow_m=64)),
        Rates(0.96, 0.65, 20.0), gated_only=True, output_weight_only=True, wider_down=True,
        narrow=((128, 32), (128, 64)),
    ),
    # Tiles are those of w4a8. From 4096 and 8192 tokens of DeepSeek-V4-Flash in MXFP4, math is 0.88 and 0.68.
    KernelFamily(
        sizes.W4A8_ROWS, (FP8_TOKEN, FP8_STATIC), "w4a8_fragments", launch.RowTilesCall,
        (Choice(7.0, 32), Choice(29.0, 128, narrow_m=32), Choice(_INF, 128, narrow_m=64)),
        Rates(0.96, 0.8, 26.0), gated_only=True, output_weight_only=True, wider_down=True,
        narrow=((128, 32), (128, 64)),
    ),
    # Weights of 8 bits in the kernels of 4 bits. Decoding takes 25 issue slots where memory leaves 59 on an H200 and
    # 38 on a B200, so that bytes decide. From them 4.4 rows are derived, not timed (docs/performance/cuda.md). Other
    # choices are those of 4 bits, but for 5.7 to 7 rows. Rates of the first: fitted to 1 to 64 tokens of Qwen3-235B.
    KernelFamily(
        sizes.W8A16_MMA, (UNQUANTIZED,), "w8a16_fragments", launch.MmaCall,
        (Choice(4.4, 8, 64),), Rates(0.94, 0.45, 8.0, rows=16), batch_invariant=False,
        rates_sm80=Rates(0.6, 0.45, 14.0, rows=16),
    ),
    # For GPUs without wgmma; it never ran. Rates: derived. Those of 4 bits, but with half of their loss of bandwidth,
    # since a byte takes half as many instructions; w8a16_mma was measured to lose half of what w4a16_mma loses.
    KernelFamily(
        sizes.W8A16_MMA_TILED, (UNQUANTIZED,), "w8a16_fragments", launch.TiledCall,
        (Choice(_INF, 96),), Rates(0.92, 0.67, 20.0, mma_sync=True),
    ),
    KernelFamily(
        sizes.W8A16_WGMMA, (UNQUANTIZED,), "w8a16_fragments", launch.WgmmaCall,
        (
            Choice(7.0, 32), Choice(29.0, 128, narrow_m=32), Choice(115.0, 128, narrow_m=64),
            Choice(_INF, 256, narrow_m=64),
        ),
        Rates(0.96, 0.95, 20.0), wider_down=True, narrow=((128, 32), (128, 64), (256, 64)),
        shorter=ShorterTiles(32, 64, 1.2),
    ),
    # Fitted to 1 to 8192 tokens of Qwen3-235B TP4 (up to 512 rows). Tiles of 320 rows are at most 1 % faster, where
    # routing is uniform and the GPU rested, and up to 36 % slower otherwise.
    KernelFamily(
        sizes.BF16, (UNQUANTIZED,), "w16_swizzle128", launch.GatheredCall,
        (Choice(14.0, 32), Choice(45.0, 64), Choice(90.0, 128), Choice(_INF, 160)),
        Rates(0.99, 1.6, 12.0, l2_math=0.6), wider_down=True,
    ),
    # Fitted to 1 to 32 tokens of DeepSeek-V3 TP8: the fastest up to 4 (1.05 rows), at 8 (1.11) no longer. K is split
    # between warps. Where w8a8_f16 has tiles of 256 rows for 0.65 of the SMs or more, which is 5.2 tiles of 32 rows for
    # each, it is as fast or faster in five shapes.
    KernelFamily(
        sizes.W8A8_MMA, (FP8_GROUP128,), "w8_fragments", launch.E4M3MmaCall,
        (Choice(1.08, 8),), Rates(0.87, 0.45, 9.0, rows=8), batch_invariant=False, gated_only=True,
        output_weight_only=True, most_fill=5.2,
    ),
    # The same for batch-invariant results, fitted to 1 to 4 tokens.
    KernelFamily(
        sizes.W8A8_MMA_ORDERED, (FP8_GROUP128,), "w8_fragments", launch.E4M3MmaCall,
        (Choice(1.08, 8),), Rates(0.84, 0.45, 9.0, rows=8), gated_only=True, output_weight_only=True,
        most_fill=5.2,
    ),
    # Fitted to 1 to 512 tokens of DeepSeek-V3 TP8 (up to 16 rows) and of three other shapes: from 12 rows on, w8a8 is
    # as fast with uniform routing, and 7 % slower to 15 % faster with Zipf. Sums of float16 products are exact enough
    # to be identical in every tile.
    KernelFamily(
        sizes.W8A8_F16, (FP8_GROUP128,), "w8_fragments", launch.E4M3RowsCall,
        (Choice(12.0, 32, last_rows=20.0), Choice(12.0, 64, last_rows=50.0)), Rates(0.92, 0.5, 14.0), gated_only=True,
        output_weight_only=True,
    ),
    # For more rows. Sums of E4M3 products have 14 bits: errors of single tokens reach 4e-2, those of 512 tokens
    # together stay below 6e-3.
    KernelFamily(
        sizes.W8A8, (FP8_GROUP128,), "w8_fragments", launch.E4M3TilesCall,
        (Choice(_INF, 160),), Rates(0.96, 0.45, 14.0), batch_invariant=False, gated_only=True, output_weight_only=True,
        check_tokens=512,
    ),
    # Fitted to 1 to 8192 tokens of DeepSeek-V3 TP8 with scales by channel. Wider tiles of w8a8_f16_channel are slower
    # than w8a8_channel.
    KernelFamily(
        sizes.W8A8_MMA_CHANNEL, (FP8_TOKEN, FP8_STATIC), "w8_fragments", launch.ChannelMmaCall,
        (Choice(1.08, 8),), Rates(0.87, 0.45, 9.0, rows=8), batch_invariant=False,
    ),
    KernelFamily(
        sizes.W8A8_MMA_ORDERED_CHANNEL, (FP8_TOKEN, FP8_STATIC), "w8_fragments", launch.ChannelMmaCall,
        (Choice(1.08, 8),), Rates(0.84, 0.45, 9.0, rows=8),
    ),
    KernelFamily(
        sizes.W8A8_F16_CHANNEL, (FP8_TOKEN, FP8_STATIC), "w8_fragments", launch.ChannelRowsCall,
        (Choice(12.0, 32),), Rates(0.89, 0.5, 16.0),
    ),
    KernelFamily(
        sizes.W8A8_CHANNEL, (FP8_TOKEN, FP8_STATIC), "w8_fragments", launch.ChannelTilesCall,
        (Choice(_INF, 160),), Rates(0.96, 0.45, 17.0), batch_invariant=False, check_tokens=512,
    ),
)  # fmt: skip

FAMILIES: dict[str, KernelFamily] = {family.name: family for family in _ALL}
"""Kernel families by name. Those for the same weights are ordered by rows per expert."""


@cache
def format_of(encoding: Encoding) -> str | None:
    """Return the name of the kernels' format for this encoding, or None.

    A global scale per expert is always optional. Scales of INT4 may be bfloat16 or float16, those of FP8 of any dtype;
    the layout converts them. MXFP8's are E8M0. Kernels for one scale per row also take one for the matrix.
    """
    granularity = PerChannel() if encoding.granularity == PerTensor() else encoding.granularity
    for name in dict.fromkeys(name for family in _ALL for name in family.formats):
        own = FORMATS[name.removesuffix("_zp")].encoding
        same = (own.element, own.granularity, name.endswith("_zp")) == (
            encoding.element,
            granularity,
            encoding.zero_points,
        )
        dtypes = {"bfloat16", "float16"} if own.element == "int4" else {own.scale_dtype}
        if same and (encoding.scale_dtype in dtypes or own.scale_dtype == "float32"):
            return name
    return None


def families_for(problem: Problem, capability: tuple[int, int] | None = None) -> list[KernelFamily]:
    """Return the families that support all of the problem's weights and its activations, in the order of the table.

    Args:
        problem: what is to run.
        capability: only those that are compiled for GPUs of this compute capability.
    """
    formats = {format_of(encoding) for encoding in problem.spec.encodings.values()}
    return [
        f
        for f in FAMILIES.values()
        if problem.activations in f.activations
        and formats <= set(f.formats)
        and (capability is None or capability in f.architectures)
    ]
