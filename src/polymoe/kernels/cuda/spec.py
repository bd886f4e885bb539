"""The CUDA kernels: one row each, from which sources, checks, configurations, predictions and launches follow.

:mod:`.build` makes ``sizes.cuh`` and ``instantiations/*.cu`` of the rows, :mod:`.launch` makes a layer's launches, and
the backend ``cuda`` chooses between them. Thresholds and rates were fitted to measurements on one H200, and where
``on`` says so on one H100 (``benchmarks/results``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polymoe.kernels.cuda.launch.args import FewRowsArgs, GemmArgs, RoundingArgs
from polymoe.kernels.cuda.launch.steps import (
    AS_WRITTEN,
    BY_TOKEN,
    H_IN_TILES,
    QUANTIZED_ROWS,
    X_IN_TILES,
    GemmInput,
    quantized_h,
    quantized_tiles,
    quantized_whole_rows,
)
from polymoe.kernels.cuda.pipelines import (
    E4M3_ROW_BYTES,
    MAX_STAGES,
    Budget,
    CtaTile,
    Pipeline,
    TeamPipeline,
    TeamVariant,
    WarpgroupPipeline,
    WarpPipeline,
    WeightFormat,
)

TILE_ROWS = 8
"""Rows of x per expert are padded to a multiple of this in permuted tiles."""

PARTS = {"gate_up": "kGateUp", "up": "kUp", "down": "kDown", "gate_up_tiles": "kGateUpTiles"}
"""Names in C++ of the parts: gate, up and the activation; up and the activation; down; or the first with x in permuted
tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Tiles that are the fastest up to a mean number of rows per expert that has any.

    Attributes:
        most_rows: the largest mean for which these tiles are the fastest.
        block_m, block_n, narrow_m: sizes of the tiles, as in ``CudaConfig``.
        last_rows: in place of ``most_rows`` where no family behind this one may be used; 0 if it is the same.
        most_skewed_rows: the largest mean with skewed routing, where gate and up have ``skewed_fill`` tiles for each SM
            or more.
        skewed_fill: see ``most_skewed_rows``.
        most_fill: most tiles of gate and up for each SM with which these tiles are the fastest.
        most_columns: most columns of the weights of down with which they are.
        instead_of: ``block_m`` of the family's tiles that these replace where their waves of gate and up take less
            time; 0 if they replace none.
        cost: time of one of these tiles relative to one of those.
    """

    most_rows: float = float("inf")
    block_m: int
    block_n: int = 0
    narrow_m: int = 0
    last_rows: float = 0.0
    most_skewed_rows: float = float("inf")
    skewed_fill: float = 0.0
    most_fill: float = float("inf")
    most_columns: float = float("inf")
    instead_of: int = 0
    cost: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of the kernels: ``time = memory_us / bandwidth + compute_us / math + fixed_us``.

    Attributes:
        bandwidth, math: fractions of the device's memory bandwidth and MMA rate that the kernels reach.
        fixed_us: time of the launches, in microseconds.
        most_math: fraction of the MMA rate that is reached where rows are so many that memory does not count; 0 for
            ``math``.
        mma_sync: whether ``math`` is a fraction of the rate of ``mma.sync``, which is not every GPU's full rate.
    """

    bandwidth: float
    math: float
    fixed_us: float
    most_math: float = 0.0
    mma_sync: bool = False

    def time_us(self, memory_us: float, compute_us: float) -> float:
        """Return the time of one call, from its times at the full bandwidth and at the full MMA rate."""
        time_us = memory_us / self.bandwidth + compute_us / self.math
        if self.most_math:
            time_us = max(time_us, compute_us / self.most_math)
        return time_us + self.fixed_us


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelFamily:
    """A spec row: kernels that compute in the same way.

    Attributes:
        name: in configurations and in tables of measured times; names of kernels and cubins begin with it.
        source: name of the header in ``gemm/`` and of its function, where it is not the family's name.
        instructions: what a GPU must have, of ``Target.instructions``.
        formats: weight formats by name, as in ``FORMATS``, and with ``_zp`` if they have zero points.
        activations: supported quantizations of x and h, as in ``ACTIVATIONS``.
        layout: name of the layout of the weights.
        cvt_layout: its name where a GPU converts the codes of one of the matrices by instructions.
        scales: what shares a scale of 8-bit weights, as its name in C++; empty for others.
        parts: the parts, of :data:`PARTS`, that have a kernel.
        tiles: tiles by ``block_m``; for w4a16_mma, those of kernels with one team.
        block_ns: values of ``block_n`` that a configuration may name; empty if it does not.
        warps: how warps share work and shared memory.
        args: the argument of the grouped GEMMs.
        x: what the first GEMM reads; the first alternative whose condition holds.
        gathers: most rows of weights with which the first GEMM gathers rows of x, by ``block_m``.
        quantized_x: whether the first GEMM reads codes of x that come quantized by token.
        h: how the first GEMM writes h, of ``BUFFERS``.
        rounded_h: what the second GEMM reads: h, or what a launch between the GEMMs makes of it.
        y: how the second GEMM writes y.
        even_tiles: whether an expert's work tiles have about as many rows each.
        wider_down: whether the down projection may run with a larger ``block_m``.
        narrow: pairs of ``block_m`` and ``narrow_m`` with which work tiles of few rows have launches of their own.
        choices: tiles by rows per expert, ascending. Of families for the same weights, those for fewer rows come first
            in the table. Beyond all choices, the last family runs with its largest tile.
        shorter: replacement tiles for calls where they fill the SMs better, or None.
        fills: fewest tiles of gate and up for each SM with which the family is faster than ``otherwise``.
        otherwise: name of the family that is taken for fewer tiles where it may be used.
        most_fill: most tiles of gate and up for each SM with which the family is faster than those behind it; with
            ``otherwise``, than that family, where it may be used.
        few_columns: most columns of x with which ``most_fill`` is no limit.
        rates: rates for the cost model.
        batch_invariant: whether a token's result is bitwise identical in any batch and with any of the family's tiles.
        devices: GPU models on which its choices are the fastest, as they were measured there; empty for all. On others
            only ``polymoe tune`` chooses it.
        on: fields by which the fastest is chosen, as they were measured on a GPU model, where they differ; by name.
        gated_only: whether experts must have a gate.
        output_weight_only: whether router weights must multiply the output.
        check_tokens: tokens of the call that checks a layer at load.
    """

    name: str
    source: str = ""
    instructions: str
    formats: Mapping[str, WeightFormat]
    activations: tuple[str, ...]
    layout: str
    cvt_layout: str = ""
    scales: str = ""
    parts: tuple[str, ...]
    tiles: Mapping[int, CtaTile]
    block_ns: tuple[int, ...] = ()
    warps: WarpgroupPipeline | TeamPipeline | WarpPipeline
    args: type[GemmArgs] = GemmArgs
    x: tuple[GemmInput, ...]
    gathers: Mapping[int, int] = field(default_factory=dict)
    quantized_x: bool = False
    h: str
    rounded_h: GemmInput = AS_WRITTEN
    y: str
    even_tiles: bool = False
    wider_down: bool = False
    narrow: tuple[tuple[int, int], ...] = ()
    choices: tuple[Choice, ...]
    shorter: ShorterTiles | None = None
    fills: float = 0.0
    otherwise: str = ""
    most_fill: float = float("inf")
    few_columns: int = 0
    rates: Rates
    batch_invariant: bool = True
    devices: tuple[str, ...] = ()
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gated_only: bool = False
    output_weight_only: bool = False
    check_tokens: int = 8

    @property
    def sorts_few_rows(self) -> bool:
        """Whether its GEMMs sort few expanded rows by themselves."""
        return issubclass(self.args, FewRowsArgs)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of the layouts of the weights on all GPUs."""
        return tuple(filter(None, (self.layout, self.cvt_layout)))

    def fitted(self, device: str) -> KernelFamily:
        """Return the row with what was measured on this GPU model."""
        return replace(self, **self.on[device]) if device in self.on else self

    def unit(self, format: str) -> str:
        """Return the name of the cubin with the family's kernels for a format."""
        return f"{self.name}_{format}"

    def kernel(self, part: str, block_m: int, variant: str = "") -> str:
        """Return the name of a kernel. It contains the name of the variant where the family has several."""
        name = f"{self.name}_{part}_m{block_m}"
        return f"{name}_{variant}" if variant else name

    def variants(self, part: str) -> tuple[str, ...]:
        """Return the variants of a part's kernels; an empty name alone if there are none."""
        return self.warps.variants(part)

    def threads(self, block_m: int) -> int:
        """Return the threads of a CTA."""
        return self.warps.threads(self.tiles[block_m])

    def pipeline(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> Pipeline:
        """Return the pipeline for ``k`` columns of weights, with as many stages as fit in shared memory."""
        return self.warps.pipeline(budget, self.formats[format], part, self.tiles[block_m], k)

    def fits(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> bool:
        """Return whether the pipeline has enough stages."""
        return self.warps.fits(budget, self.formats[format], part, self.tiles[block_m], k)


def _tiles(*tiles: CtaTile) -> dict[int, CtaTile]:
    return {tile.block_m: tile for tile in tiles}


_ALL, _GATED = ("gate_up", "up", "down"), ("gate_up", "down")

W4_FORMATS: dict[str, WeightFormat] = {
    "mxfp4": WeightFormat("Mxfp4", scale_bytes=128, cvt="Mxfp4Cvt"),
    "nvfp4": WeightFormat("Nvfp4", scale_bytes=256, cvt="Nvfp4Cvt"),
    "int4_g32": WeightFormat("Int4<32>", scale_bytes=256),
    "int4_g128": WeightFormat("Int4<128>", scale_bytes=128, scale_blocks=2),
    "int4_g32_zp": WeightFormat("Int4<32, true>", scale_bytes=512),
    "int4_g128_zp": WeightFormat("Int4<128, true>", scale_bytes=256, scale_blocks=2),
}
"""Formats that the w4a16 kernels dequantize. With zero points (zp), an offset is stored beside each scale."""

_K256 = TeamVariant(name="k256", block_n=128, teams=4, most_k=256)
_K512 = TeamVariant(name="k512", teams=8, most_k=512)
_SPLIT = TeamVariant(name="n64")
_IN_ORDER = TeamVariant(name="", teams=4, x_in_stages=True)

# An H100's memory leaves issue slots to w4a16_wgmma, and experts with more than 8 rows, as some have with skewed
# routing, take several tiles of w4a16_mma. It needs 2.5 tiles of its 512 rows of weights for each SM, 20 of 64.
_FEW_ROWS_H100 = (Choice(most_rows=4.4, block_m=8, block_n=64, most_skewed_rows=3.36, skewed_fill=20.0),)

# Fitted to 1 to 128 tokens of DeepSeek-V4-Flash in MXFP4: up to 3.2 rows per expert. K is split between warps, so that
# the order of sums differs from w4a16_wgmma.
W4A16_MMA = KernelFamily(
    name="w4a16_mma",
    instructions="mma",
    formats=W4_FORMATS,
    activations=("16bit",),
    layout="w4a16_fragments",
    cvt_layout="w4a16_fragments_cvt",
    parts=_ALL,
    tiles=_tiles(CtaTile(block_m=8, block_n=64, block_k=512)),
    block_ns=(64,),
    warps=TeamPipeline(down=(_K256, _K512, _SPLIT)),
    args=FewRowsArgs,
    x=(BY_TOKEN,),
    h="bf16_rows",
    y="float32_rows",
    choices=(Choice(most_rows=4.4, block_m=8, block_n=64),),
    rates=Rates(bandwidth=0.875, math=0.45, fixed_us=10.0),
    batch_invariant=False,
    on={"h100": {"choices": _FEW_ROWS_H100}},
)
"""4-bit weights decoded to bfloat16 for ``mma.sync``, for few rows per expert."""

# Fitted to 1 to 128 tokens of DeepSeek-V4-Flash in MXFP4, and `on` to 136 cells of drawn shapes
# (benchmarks/experiments/w8a8/untuned-shapes.md). With 0.94 tiles for an SM, Kimi K2 TP8 is slower than with w4a16_mma,
# with 1.9 as fast; two drawn shapes with 1.14 and 1.39 are faster, for which w4a16_mma takes a second wave of tiles.
# An H100 has 0.73 of an H200's bandwidth at the same clocks, so that issue slots are left: with many tiles w4a16_mma is
# faster there, unless x has so few columns that adding up the sums of its warps counts, and w4a16_wgmma needs fewer
# rows.
W4A16_MMA_ORDERED = replace(
    W4A16_MMA,
    name="w4a16_mma_ordered",
    source="w4a16_mma",
    instructions="wgmma",
    cvt_layout="",
    warps=TeamPipeline(down=(_K256, _K512, _IN_ORDER), ordered=True, static_bytes=1024),
    fills=1.1,
    otherwise="w4a16_mma",
    rates=Rates(bandwidth=0.93, math=0.32, fixed_us=9.0),
    on={"h100": {"choices": _FEW_ROWS_H100, "most_fill": 12.0, "few_columns": 1408}},
    batch_invariant=True,
)
"""The same, with sums in the order of w4a16_wgmma's."""

# For GPUs without wgmma, where it never ran. One tile for all rows: a width for every 16 of them costs little code.
# Four stages fit in 99 KB. Rates: fitted to 128 to 8192 tokens of DeepSeek-V4-Flash in its 99 KB configuration on an
# H200. In every tile one accumulator adds K in order, 16 columns at a time, as in w4a16_wgmma.
W4A16_MMA_TILED = KernelFamily(
    name="w4a16_mma_tiled",
    instructions="mma_tiled",
    formats=W4_FORMATS,
    activations=("16bit",),
    layout="w4a16_fragments",
    cvt_layout="w4a16_fragments_cvt",
    parts=_ALL,
    tiles=_tiles(CtaTile(block_m=96, block_n=256, block_k=64, warpgroups=2, widths=(16, 32, 48, 64, 80))),
    warps=WarpgroupPipeline(x_bytes=128),
    x=(X_IN_TILES,),
    h="bf16_tiles",
    y="bf16_rows",
    choices=(Choice(block_m=96),),
    rates=Rates(bandwidth=0.85, math=0.67, fixed_us=20.0, mma_sync=True),
)
"""4-bit weights decoded to bfloat16 in registers, for ``mma.sync``, for many rows per expert on GPUs without wgmma."""

_MANY_ROWS = (Choice(block_m=128, narrow_m=64, most_columns=384), Choice(block_m=256, narrow_m=64))

# Sizes are the fastest measured: many rows of weights per CTA for few rows of x. Fitted to 256 to 1024 tokens (6 to 24
# rows), 2048 (48), 4096 (96), and more. In every tile, one accumulator adds K in order, 16 columns at a time. The cost
# of `shorter` is the largest of DeepSeek-V4-Flash and Kimi K2 TP8 at 256 and 512 tokens. Narrow tiles were chosen by
# times with uniform and with Zipf routing. Rows of x are gathered for two or three tiles of weights, each of which
# gathers them again, and with 256 rows for none. With 256 and 384 columns of down, main loops are too short for tiles
# of 256 rows of x. On an H100 these are faster from 128 rows on, and where an SM has few tiles of 512 rows of weights,
# those of 256 rows of weights are.
W4A16_WGMMA = KernelFamily(
    name="w4a16_wgmma",
    instructions="wgmma",
    formats=W4_FORMATS,
    activations=("16bit",),
    layout="w4a16_fragments",
    parts=_ALL,
    tiles=_tiles(
        CtaTile(block_m=32, block_n=512, block_k=128, warpgroups=4, widths=(16,)),
        CtaTile(block_m=64, block_n=256, block_k=128, warpgroups=4, widths=(32, 48)),
        CtaTile(block_m=128, block_n=256, block_k=128, warpgroups=2, widths=(48, 96)),
        CtaTile(block_m=256, block_n=128, block_k=64, warpgroups=2, widths=(96, 160, 192, 224)),
    ),
    warps=WarpgroupPipeline(x_bytes=128),
    x=(
        GemmInput(when="few_rows_of_weights"),
        X_IN_TILES,
    ),
    gathers={32: 1024, 64: 768, 128: 768},
    h="bf16_tiles",
    y="bf16_rows",
    wider_down=True,
    narrow=((128, 32), (128, 64), (256, 64)),
    choices=(
        Choice(most_rows=5.7, block_m=32),
        Choice(most_rows=29.0, block_m=128, narrow_m=32),
        Choice(most_rows=140.0, block_m=128, narrow_m=64),
        *_MANY_ROWS,
    ),
    shorter=ShorterTiles(block_m=32, instead=64, cost=1.2),
    rates=Rates(bandwidth=0.96, math=0.95, fixed_us=20.0),
    on={
        "h100": {
            "choices": (
                Choice(most_rows=5.7, block_m=32),
                Choice(most_rows=20.0, block_m=64, most_fill=2.75),
                Choice(most_rows=29.0, block_m=128, narrow_m=64, most_fill=2.75),
                Choice(most_rows=29.0, block_m=128, narrow_m=32),
                Choice(most_rows=115.0, block_m=128, narrow_m=64),
                *_MANY_ROWS,
            )
        }
    },
)
"""4-bit weights decoded to bfloat16 in registers, for ``wgmma``."""

# With a gate, 256 rows of weights are 128 columns of h, which share a scale. Scratch memory contains a table of
# magnitudes, and the amax of each row of h for three alternating tiles. Fitted to 1 to 256 tokens of DeepSeek-V4-Flash
# (up to 6 rows), 512 and 1024 (24), 2048 (48), and more.
W4A8 = KernelFamily(
    name="w4a8",
    instructions="wgmma",
    formats={"mxfp4": replace(W4_FORMATS["mxfp4"], cpp="")},
    activations=("fp8_group128",),
    layout="w4a8_fragments",
    parts=_GATED,
    tiles=_tiles(
        CtaTile(block_m=16, block_n=256, block_k=256, warpgroups=4, widths=(8,)),
        CtaTile(block_m=32, block_n=256, block_k=256, warpgroups=4, widths=(8, 16, 24)),
        CtaTile(block_m=64, block_n=256, block_k=256, warpgroups=4, widths=(32, 48)),
        CtaTile(block_m=128, block_n=256, block_k=128, warpgroups=2, widths=(32, 64, 96, 112)),
    ),
    warps=WarpgroupPipeline(x_bytes=E4M3_ROW_BYTES // 2, scratch_bytes=128, scratch_row_bytes=12),
    x=(quantized_tiles(),),
    h="e4m3_tiles",
    y="bf16_rows",
    wider_down=True,
    narrow=((128, 32), (128, 64)),
    choices=(
        Choice(most_rows=5.0, block_m=16),
        Choice(most_rows=7.0, block_m=32),
        Choice(most_rows=29.0, block_m=128, narrow_m=32),
        Choice(block_m=128, narrow_m=64),
    ),
    rates=Rates(bandwidth=0.96, math=0.65, fixed_us=20.0, most_math=0.42),
    on={"h100": {"rates": Rates(bandwidth=0.96, math=0.65, fixed_us=20.0, most_math=0.335)}},
    gated_only=True,
    output_weight_only=True,
)
"""MXFP4 weights decoded to E4M3 in registers, rows in E4M3."""

# Scratch memory contains a table and, for each of up to 16 warps, the scales of the work tile's rows. A turn of the
# main loop is as many stages as are added up in E4M3, so a stage has 128 columns: of INT4 one group, whose scale is in
# float32, with the zero point in its last bits. From 4096 and 8192 tokens of DeepSeek-V4-Flash in MXFP4, math is 0.88
# and 0.68. On an H100 with few tiles, a second list of narrow ones costs more than it gains.
_ROWS = (*W4A8.choices[1:-1], Choice(most_rows=60.0, last_rows=float("inf"), block_m=128, narrow_m=64))
W4A8_ROWS = replace(
    W4A8,
    name="w4a8_rows",
    formats={
        "mxfp4": replace(W4_FORMATS["mxfp4"], cpp="Mxfp4ToE4m3"),
        "int4_g128": WeightFormat("Int4ToE4m3<false>", scale_bytes=256, scale_blocks=2),
        "int4_g128_zp": WeightFormat("Int4ToE4m3<true>", scale_bytes=256, scale_blocks=2),
    },
    activations=("fp8_token", "fp8_static"),
    tiles=_tiles(
        CtaTile(block_m=32, block_n=256, block_k=128, warpgroups=4, widths=(8, 16, 24)),
        CtaTile(block_m=64, block_n=256, block_k=128, warpgroups=4, widths=(32, 48)),
        CtaTile(block_m=128, block_n=256, block_k=128, warpgroups=2, widths=(32, 64, 96, 112)),
    ),
    warps=WarpgroupPipeline(x_bytes=E4M3_ROW_BYTES // 2, scratch_bytes=256, scratch_row_bytes=64),
    x=(quantized_whole_rows("quantize_row_tiles", "e4m3_tiles", by_token=False),),
    h="float32_rows",
    rounded_h=quantized_h("quantize_row_tiles", "e4m3_tiles"),
    choices=_ROWS,
    rates=Rates(bandwidth=0.96, math=0.8, fixed_us=26.0, most_math=0.48),
    on={
        "h100": {
            "choices": (
                Choice(most_rows=13.0, block_m=32, most_fill=8.0),
                Choice(most_rows=29.0, block_m=64, most_fill=8.0),
                *_ROWS,
            ),
            "rates": Rates(bandwidth=0.96, math=0.8, fixed_us=26.0, most_math=0.35),
        }
    },
)
"""The same with one scale for a row of x."""

# Without sums beside the accumulators four warpgroups fit, with at most 112 rows of x. Fitted on an H100 to 1024 to
# 16384 tokens of DeepSeek-V4-Flash: 1.02 of the time of w4a8_rows with 48 rows per expert, 0.90 with 72, 0.88 to 0.93
# with 96 and more; the H200's rate, not measured, is that of w4a8_rows over 0.9. Not the same bits as w4a8_rows, which
# runs for fewer rows.
W4A8_ROWS_FAST = replace(
    W4A8_ROWS,
    name="w4a8_rows_fast",
    source="w4a8_rows",
    formats={"mxfp4": replace(W4_FORMATS["mxfp4"], cpp="FastAccumulation<Mxfp4ToE4m3>")},
    activations=("fp8_token_fast_accumulation", "fp8_static_fast_accumulation"),
    tiles=_tiles(CtaTile(block_m=112, block_n=256, block_k=128, warpgroups=4, widths=(80,))),
    narrow=(),
    choices=(Choice(block_m=112),),
    rates=Rates(bandwidth=0.96, math=0.89, fixed_us=26.0, most_math=0.53),
    on={"h100": {"rates": Rates(bandwidth=0.96, math=0.89, fixed_us=26.0, most_math=0.385)}},
    batch_invariant=False,
    check_tokens=512,
)
"""The same with fast accumulation: the tensor cores add up all of K."""


# Weights of 8 bits in the kernels of 4 bits. Decoding takes 25 issue slots where memory leaves 59 on an H200 and 38 on
# a B200, so that bytes decide. From them 4.4 rows are derived, not timed (docs/performance/cuda.md). Other choices are
# those of 4 bits, but for 5.7 to 7 rows. Rates of the first: fitted to 1 to 64 tokens of Qwen3-235B.
def _eight_bits(family: KernelFamily, **changes: Any) -> KernelFamily:
    return replace(
        family,
        name=family.name.replace("w4", "w8"),
        source=family.name,
        formats={"mxfp8": WeightFormat("Mxfp8", columns=32, scale_bytes=64)},
        layout="w8a16_fragments",
        cvt_layout="",
        on={},
        **changes,
    )


W8A16_MMA = _eight_bits(
    W4A16_MMA,
    warps=TeamPipeline(down=(_SPLIT,)),
    rates=Rates(bandwidth=0.94, math=0.45, fixed_us=8.0),
)
# It never ran. Rates: derived. Those of 4 bits, but with half of their loss of bandwidth, since a byte takes half as
# many instructions; w8a16_mma was measured to lose half of what w4a16_mma loses.
W8A16_MMA_TILED = _eight_bits(W4A16_MMA_TILED, rates=Rates(bandwidth=0.92, math=0.67, fixed_us=20.0, mma_sync=True))
W8A16_WGMMA = _eight_bits(
    W4A16_WGMMA,
    choices=(
        Choice(most_rows=7.0, block_m=32),
        Choice(most_rows=29.0, block_m=128, narrow_m=32),
        Choice(most_rows=115.0, block_m=128, narrow_m=64),
        Choice(block_m=256, narrow_m=64),
    ),
)
"""E4M3 weights with E8M0 scales, decoded to bfloat16 by the same kernels."""

# Fitted to 1 to 8192 tokens of Qwen3-235B TP4 (up to 512 rows). Tiles of 320 rows were up to 36 % slower, and at most
# 1 % faster, where routing was uniform and the GPU rested.
BF16 = KernelFamily(
    name="bf16",
    instructions="wgmma",
    formats={"bf16": WeightFormat(columns=16)},
    activations=("16bit",),
    layout="w16_swizzle128",
    parts=_ALL,
    tiles=_tiles(
        CtaTile(block_m=32, block_n=128, block_k=128, warpgroups=2, widths=(8, 16, 24)),
        CtaTile(block_m=64, block_n=128, block_k=128, warpgroups=2, widths=(16, 32, 48)),
        CtaTile(block_m=128, block_n=256, block_k=64, warpgroups=2, widths=(32, 64, 96)),
        CtaTile(block_m=160, block_n=256, block_k=64, warpgroups=2, widths=(32, 64, 96, 128)),
    ),
    warps=WarpgroupPipeline(x_bytes=128),
    x=(BY_TOKEN,),
    h="bf16_tiles",
    y="bf16_rows",
    even_tiles=True,
    wider_down=True,
    choices=(
        Choice(most_rows=14.0, block_m=32),
        Choice(most_rows=45.0, block_m=64),
        Choice(most_rows=90.0, block_m=128),
        Choice(block_m=160),
    ),
    rates=Rates(bandwidth=0.99, math=1.6, fixed_us=12.0, most_math=0.6),
)
"""bfloat16 weights, read by ``wgmma`` as they are."""

_BARRIER_BYTES = 16 * (MAX_STAGES + 1)  # two for each stage, and two that alternate the warpgroups
_QUEUE_BYTES = 28 * MAX_STAGES + 160  # a barrier and a tile for each stage; a tile for each of eight warps

# A warp's blocks are 32 rows by 128 columns of weights. Fitted to 1 to 32 tokens of DeepSeek-V3 TP8: the fastest up to
# 4 (1.05 rows), at 8 (1.11) no longer. K is split between warps. Where w8a8_f16 has tiles of 256 rows for 0.65 of the
# SMs or more, which is 5.2 tiles of 32 rows for each, it is as fast or faster in five shapes. With fewer it is slower
# up to 4 rows in six shapes with few experts on an H100, and with one tile for each SM up to 8 rows.
W8A8_MMA = KernelFamily(
    name="w8a8_mma",
    instructions="wgmma",
    formats={"fp8_block128": WeightFormat(columns=32)},
    activations=("fp8_group128",),
    layout="w8_swizzle128",
    scales="kBlock128",
    parts=_GATED,
    tiles=_tiles(CtaTile(block_m=8, block_n=32, block_k=128)),
    warps=WarpPipeline(),
    args=RoundingArgs,
    x=(BY_TOKEN,),
    quantized_x=True,
    h="float32_rows",
    y="float32_rows",
    choices=(Choice(most_rows=1.08, block_m=8),),
    on={"h100": {"choices": (Choice(most_rows=4.1, block_m=8), Choice(most_rows=8.0, block_m=8, most_fill=1.0))}},
    most_fill=5.2,
    rates=Rates(bandwidth=0.87, math=0.45, fixed_us=9.0),
    batch_invariant=False,
    gated_only=True,
    output_weight_only=True,
)
"""E4M3 weights, and rows rounded to E4M3, both converted to float16 for ``mma.sync``, for few rows per expert."""

# Fitted to 1 to 4 tokens.
W8A8_MMA_ORDERED = replace(
    W8A8_MMA,
    name="w8a8_mma_ordered",
    source="w8a8_mma",
    warps=WarpPipeline(ordered=True),
    on={},
    rates=Rates(bandwidth=0.84, math=0.45, fixed_us=9.0),
    batch_invariant=True,
)
"""The same, with sums in the order of w8a8_f16's."""

# A stage contains two scales for each row of x. Static memory contains a maximum per consumer warp, and two scales.
# Fitted to 1 to 512 tokens of DeepSeek-V3 TP8 (up to 16 rows) and of three other shapes: from 12 rows on, w8a8 is as
# fast with uniform routing, and 7 % slower to 15 % faster with Zipf. With few experts on an H100 it is 4 to 10 % faster
# than that at 13 to 16 rows in four shapes. Sums of float16 products are exact enough to be identical in every tile.
W8A8_F16 = replace(
    W8A8_MMA,
    name="w8a8_f16",
    tiles=_tiles(
        CtaTile(block_m=32, block_n=256, block_k=128, warpgroups=2, widths=(16,)),
        CtaTile(block_m=64, block_n=256, block_k=128, warpgroups=2, widths=(32, 48)),
        CtaTile(block_m=96, block_n=256, block_k=128, warpgroups=2, widths=(48, 64, 80)),
    ),
    warps=WarpgroupPipeline(x_bytes=128, row_bytes=8, static_bytes=_BARRIER_BYTES, static_row_bytes=40),
    args=GemmArgs,
    x=(QUANTIZED_ROWS,),
    h="e4m3_rows",
    y="bf16_rows",
    choices=(
        Choice(most_rows=12.0, block_m=32, last_rows=20.0),
        Choice(most_rows=12.0, block_m=64, last_rows=50.0),
    ),
    on={
        "h100": {
            "choices": (
                Choice(most_rows=12.0, block_m=32, last_rows=20.0),
                Choice(most_rows=17.0, block_m=32, most_fill=1.0),
                Choice(most_rows=12.0, block_m=64, last_rows=50.0),
            )
        }
    },
    most_fill=float("inf"),
    rates=Rates(bandwidth=0.92, math=0.5, fixed_us=14.0),
    batch_invariant=True,
)
"""E4M3 weights and rows, both converted to float16, whose sums are exact."""

# A stage contains a scale for each row of x, and where rounding leaves room two of weights. Static memory contains the
# amax of each row of h for three alternating tiles. For more rows: sums of E4M3 products have 14 bits, errors of single
# tokens reach 4e-2, those of 512 tokens together stay below 6e-3. Where a token has one expert, x is in permuted tiles,
# which the first GEMM copies in bulk: with more, tiles have more bytes than x.
W8A8 = replace(
    W8A8_F16,
    name="w8a8",
    parts=(*_GATED, "gate_up_tiles"),
    tiles=_tiles(
        CtaTile(block_m=160, block_n=256, block_k=128, warpgroups=2, widths=(32, 64, 80, 96, 112, 128)),
    ),
    warps=WarpgroupPipeline(
        x_bytes=64, row_bytes=4, static_bytes=_BARRIER_BYTES + _QUEUE_BYTES, static_row_bytes=12
    ),
    x=(
        quantized_tiles(part="gate_up_tiles", when="one_expert_a_token"),
        QUANTIZED_ROWS,
    ),
    h="e4m3_tiles",
    choices=(Choice(most_rows=60.0, block_m=160), Choice(most_rows=190.0, block_m=160, most_columns=384)),
    on={},
    fills=1.2,
    otherwise="w8a8_shared",
    rates=Rates(bandwidth=0.96, math=0.45, fixed_us=14.0),
    batch_invariant=False,
    check_tokens=512,
)  # fmt: skip
"""E4M3 weights and rows, multiplied in E4M3. Sums of 128 columns have 14 bits."""

_X_TILES = quantized_tiles(part="gate_up_tiles")

# Fitted to ten drawn shapes and to 1024 to 16384 tokens of three others on an H100; it never ran on an H200. w8a8 takes
# 0.99 to 1.02 times as long with up to 64 rows of uniform routing, and 1.05 to 1.13 of Zipf; 1.12 to 1.33 with 128 and
# 171. Where the GPU rests between calls, it is 2 % faster at 128 rows, and 10 % with 256 columns of down; from 256 rows
# on it takes 1.07 to 1.46 times as long. With eight experts a token, tiles of x gain 1 to 9 % where there are 2816 rows
# of weights, and lose 5 to 12 % with 512. With 1, 4 and 9 experts of 4096 rows of weights for gate and up, w8a8 takes
# 1.00 to 1.14 times as long from 26 to 60 rows; with 32 it does not. Tiles of 64 rows take 0.6 of the time of 128.
W8A8_SHARED = replace(
    W8A8,
    name="w8a8_shared",
    scales="",
    tiles=_tiles(
        CtaTile(block_m=128, block_n=256, block_k=128, warpgroups=2, widths=(64,)),
        CtaTile(block_m=64, block_n=256, block_k=128, warpgroups=2),
    ),
    warps=WarpgroupPipeline(
        x_bytes=64, row_bytes=4, static_bytes=_BARRIER_BYTES + _QUEUE_BYTES, static_row_bytes=16
    ),
    x=(
        replace(_X_TILES, when="one_expert_a_token"),
        replace(QUANTIZED_ROWS, when="few_rows_of_weights"),
        _X_TILES,
    ),
    gathers={64: 1536, 128: 1536},
    devices=("h100",),
    choices=(Choice(block_m=64, instead_of=128, cost=0.6), Choice(block_m=128)),
    fills=0.0,
    otherwise="",
    rates=Rates(bandwidth=0.96, math=0.6, fixed_us=14.0),
)  # fmt: skip
"""The same with both operands of the MMA in shared memory, for more rows per expert."""

# Fitted to 8 to 256 rows of one and of two experts with 4096 rows of weights for gate and up, on an H100.
W8A8_SHARED_N128 = replace(
    W8A8_SHARED,
    name="w8a8_shared_n128",
    source="w8a8_shared",
    tiles=_tiles(CtaTile(block_m=64, block_n=128, block_k=128, warpgroups=1)),
    h="float32_rows",
    rounded_h=H_IN_TILES,
    choices=(
        Choice(most_rows=66.0, block_m=64, most_fill=0.5),
        Choice(most_rows=130.0, block_m=64, most_fill=0.25),
    ),
    rates=Rates(bandwidth=0.75, math=1.0, fixed_us=17.0),
)
"""The same with tiles of half as many rows of weights, where tiles are fewer than SMs."""


def _by_channel(family: KernelFamily, rates: Rates, **changes: Any) -> KernelFamily:
    """Return the family for one scale for a row of weights and one for a row of x. Experts need no gate."""
    return replace(
        family,
        name=f"{family.name}_channel",
        source=family.source or family.name,
        formats={"fp8_channel": WeightFormat(columns=32)},
        activations=("fp8_token", "fp8_static"),
        scales="kChannel",
        parts=_ALL,
        fills=0.0,
        otherwise="",
        on={},
        most_fill=float("inf"),
        rates=rates,
        gated_only=False,
        output_weight_only=False,
        **changes,
    )


def _rounded(kernel: str, h: str) -> dict[str, Any]:
    """Return how launches round x, with static scales, which are those of experts, by permuted row; and h."""
    static = quantized_whole_rows(kernel, by_token=False, when="static_scales")
    return {"x": (static, quantized_whole_rows(kernel)), "h": "float32_rows", "rounded_h": quantized_h(kernel, h)}


# Fitted to 1 to 8192 tokens of DeepSeek-V3 TP8 with scales by channel. Wider tiles of w8a8_f16_channel are slower than
# w8a8_channel.
W8A8_MMA_CHANNEL = _by_channel(W8A8_MMA, W8A8_MMA.rates)
W8A8_MMA_ORDERED_CHANNEL = _by_channel(W8A8_MMA_ORDERED, W8A8_MMA_ORDERED.rates)
W8A8_F16_CHANNEL = _by_channel(
    W8A8_F16,
    Rates(bandwidth=0.89, math=0.5, fixed_us=16.0),
    tiles=_tiles(W8A8_F16.tiles[32]),
    choices=(Choice(most_rows=12.0, block_m=32),),
    **_rounded("quantize_whole_rows", "e4m3_rows"),
)
W8A8_CHANNEL = _by_channel(
    W8A8,
    Rates(bandwidth=0.96, math=0.45, fixed_us=17.0),
    **_rounded("quantize_whole_rows", "e4m3_tiles"),
)

KERNEL_FAMILIES: dict[str, KernelFamily] = {
    family.name: family
    for family in (
        *(W4A16_MMA_ORDERED, W4A16_MMA, W4A16_MMA_TILED, W4A16_WGMMA, W4A8, W4A8_ROWS, W4A8_ROWS_FAST),
        *(W8A16_MMA, W8A16_MMA_TILED, W8A16_WGMMA, BF16),
        *(W8A8_MMA, W8A8_MMA_ORDERED, W8A8_SHARED_N128, W8A8_F16, W8A8, W8A8_SHARED),
        *(W8A8_MMA_CHANNEL, W8A8_MMA_ORDERED_CHANNEL, W8A8_F16_CHANNEL, W8A8_CHANNEL),
    )
}
"""All rows by name. Those for the same weights are ordered by rows per expert."""
