"""Sizes that the CUDA kernels and their launchers share: tiles, pipeline stages, shared memory.

:mod:`.build` makes ``sizes.cuh`` and ``instantiations/*.cu`` of this table. A static assertion in C++
checks the bytes of a stage.

M is the number of tokens; N and K are the rows and columns of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = [
    "ALIGNMENT",
    "BF16",
    "E4M3_BLOCK_K",
    "E4M3_ROW_BYTES",
    "FAMILIES",
    "MAX_STAGES",
    "MIN_STAGES",
    "PARTS",
    "SM80_COPY_WARPS",
    "TILE_ROWS",
    "W4A8",
    "W4A8_ROWS",
    "W4A16_MMA",
    "W4A16_MMA_ORDERED",
    "W4A16_MMA_TILED",
    "W4A16_WGMMA",
    "W4_FORMATS",
    "W8A8",
    "W8A8_CHANNEL",
    "W8A8_F16",
    "W8A8_F16_CHANNEL",
    "W8A8_MMA",
    "W8A8_MMA_CHANNEL",
    "W8A8_MMA_ORDERED",
    "W8A8_MMA_ORDERED_CHANNEL",
    "W8A16_MMA",
    "W8A16_MMA_TILED",
    "W8A16_WGMMA",
    "Budget",
    "CtaTile",
    "FamilySizes",
    "FewRowsFamilySizes",
    "MmaFamilySizes",
    "OrderedMmaFamilySizes",
    "Pipeline",
    "WeightFormat",
    "e4m3_row_bytes",
    "round_up",
]

STATIC_BYTES = 2048
"""Static shared memory that is reserved unless a family specifies its own."""

ALIGNMENT = 1024
"""Alignment of stages in bytes: the period of 128-byte swizzling."""

MAX_STAGES = 16
"""Most pipeline stages: the number of pairs of mbarriers in a kernel."""

MIN_STAGES = 3
"""Fewest stages with which the w4a16_mma kernels are used where whole rows of x lie beside them; else one less."""

SM80_COPY_WARPS = 3
"""Warps that share in copying weights where there is no bulk copy engine."""

TILE_ROWS = 8
"""Rows of x per expert are padded to a multiple of this in permuted tiles."""

E4M3_BLOCK_K = 128
"""Columns of x or h that share a scale, and those of a tile of permuted E4M3 rows."""

E4M3_ROW_BYTES = E4M3_BLOCK_K + 4
"""Bytes of a row in such a tile: codes and a float32 scale."""

PARTS = {"gate_up": "kGateUp", "up": "kUp", "down": "kDown", "gate_up_tiles": "kGateUpTiles"}
"""Names in C++ of the parts: gate, up and the activation; up and the activation; down; or the first with x in permuted
tiles."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def e4m3_row_bytes(columns: int) -> int:
    """Return the bytes of an E4M3 row outside of tiles: codes, then float32 scales, padded to 16 bytes."""
    return columns + round_up(columns // 32, 16)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format as the kernels with bfloat16 or E4M3 rows read it.

    Attributes:
        cpp: name of its C++ type in ``dequant/``.
        scale_bytes: bytes of scales for 64 rows and ``scale_blocks`` times ``columns`` columns of weights.
        scale_blocks: blocks of ``columns`` columns that share a block of scales.
        cvt: the C++ type where a GPU converts its codes and scales by instructions; empty if none does.
        columns: columns of a block, which with 64 rows is 2 KiB of codes.
    """

    cpp: str
    scale_bytes: int
    scale_blocks: int
    cvt: str = ""
    columns: int = 64


W4_FORMATS: dict[str, WeightFormat] = {
    "mxfp4": WeightFormat("Mxfp4", 128, 1, "Mxfp4Cvt"),
    "nvfp4": WeightFormat("Nvfp4", 256, 1, "Nvfp4Cvt"),
    "int4_g32": WeightFormat("Int4<32>", 256, 1),
    "int4_g128": WeightFormat("Int4<128>", 128, 2),
    "int4_g32_zp": WeightFormat("Int4<32, true>", 512, 1),
    "int4_g128_zp": WeightFormat("Int4<128, true>", 256, 2),
}
"""Formats that the w4a16 kernels dequantize. With zero points (zp), an offset is stored beside each scale."""

_NO_SCALES = WeightFormat("", 0, 1)


@dataclass(frozen=True, slots=True)
class CtaTile:
    """The tile that a CTA computes at a time.

    Attributes:
        block_m: most rows of x in a work tile.
        block_n: rows of weights.
        block_k: columns of a pipeline stage.
        warpgroups: consumer warpgroups, or 0 where consumers are single warps.
        widths: smaller widths of the MMA instruction, for work tiles with fewer than ``block_m`` rows of x.
    """

    block_m: int
    block_n: int
    block_k: int
    warpgroups: int
    widths: tuple[int, ...] = ()

    @property
    def n_blocks(self) -> int:
        """Blocks of 64 rows of weights per consumer warpgroup."""
        return self.block_n // 64 // self.warpgroups

    @property
    def k_blocks(self) -> int:
        """Blocks of 64 columns in a stage."""
        return self.block_k // 64


class Pipeline(NamedTuple):
    """Pipeline stages of a launch, its separate buffers of x (w4a16_mma), and its bytes of dynamic shared memory."""

    stages: int
    x_buffers: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The shared memory of a CTA.

    Attributes:
        shared_bytes: most bytes, static and dynamic.
        x_in_stages: whether w4a16_mma keeps x in the stages of its pipeline, as many columns as a stage has of weights,
            so that shared memory does not grow with K. Otherwise whole rows of x lie beside the stages.
    """

    shared_bytes: int
    x_in_stages: bool


@dataclass(frozen=True, slots=True)
class FamilySizes:
    """Sizes of a kernel family.

    Attributes:
        name: name of the family; the names of its kernels and units begin with it.
        formats: weight formats, each with its sizes or None.
        tiles: tiles by ``block_m``; for w4a16_mma, those of kernels with one team.
        parts: the parts, of :data:`PARTS`, that have a kernel.
        codes_bytes: bytes of 64 rows by 64 columns of weights; for :class:`MmaFamilySizes`, of a block.
        x_bytes: bytes of 64 columns of a row of x.
        row_bytes: further bytes for each row of x in a stage.
        scratch_bytes, scratch_row_bytes: bytes of dynamic shared memory after the stages, and per row of x.
        static_bytes, static_row_bytes: bytes of static shared memory, and per row of x.
        block_ns: values of ``block_n`` that a configuration may name; empty if it does not.
        scales: what shares a scale of 8-bit weights, as its name in C++; empty for others.
        source: name of the header in ``gemm/`` and of its function, where it is not the family's name.
    """

    name: str
    formats: Mapping[str, WeightFormat | None]
    tiles: Mapping[int, CtaTile]
    parts: tuple[str, ...]
    codes_bytes: int
    x_bytes: int
    row_bytes: int = 0
    scratch_bytes: int = 0
    scratch_row_bytes: int = 0
    static_bytes: int = STATIC_BYTES
    static_row_bytes: int = 0
    block_ns: tuple[int, ...] = field(default=())
    scales: str = ""
    source: str = ""

    def unit(self, format: str) -> str:
        """Return the name of the cubin with the family's kernels for a format."""
        return f"{self.name}_{format}"

    def kernel(self, part: str, block_m: int, variant: str = "") -> str:
        """Return the name of a kernel. It contains the name of the variant where the family has several."""
        name = f"{self.name}_{part}_m{round_up(block_m, 8)}"
        return f"{name}_{variant}" if variant else name

    def variants(self, part: str) -> tuple[str, ...]:
        """Return the variants of a part's kernels; an empty name alone if there are none."""
        return ("",)

    def variant(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> str:
        """Return the variant of the kernel for ``k`` columns of weights."""
        return ""

    def threads(self, block_m: int) -> int:
        """Return the threads of a CTA: consumers and four producer warps."""
        return self.tiles[block_m].warpgroups * 128 + 128

    def stage_bytes(self, format: str, block_m: int) -> int:
        """Return the bytes of a pipeline stage: codes and scales of weights, x and its scales."""
        tile, sizes = self.tiles[block_m], self.formats[format] or _NO_SCALES
        scales = -(-tile.block_k // (sizes.columns * sizes.scale_blocks)) * sizes.scale_bytes
        weights = tile.block_n // 64 * (tile.k_blocks * self.codes_bytes + scales)
        return round_up(weights + block_m * (tile.k_blocks * self.x_bytes + self.row_bytes), ALIGNMENT)

    def fits(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> bool:
        """Return True: stages contain a part of x's columns, so that every ``k`` fits in shared memory."""
        return True

    def pipeline(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> Pipeline:
        """Return the pipeline with as many stages as fit in shared memory."""
        stage = self.stage_bytes(format, block_m)
        beside = self.scratch_bytes + self.scratch_row_bytes * block_m + ALIGNMENT
        static = self.static_bytes + self.static_row_bytes * block_m
        stages = min((budget.shared_bytes - static - beside) // stage, MAX_STAGES)
        return Pipeline(stages, 1, stages * stage + beside)


class MmaVariant(NamedTuple):
    """How the warps of a w4a16_mma kernel share work.

    Attributes:
        block_n: rows of weights in a tile.
        teams: teams of warps that have tiles of their own. One team divides K between its warps.
        most_k: most columns of weights.
    """

    block_n: int
    teams: int
    most_k: float


_SPLIT = "n64"
_MMA_VARIANTS = {
    "k256": MmaVariant(128, 4, 256),
    "k512": MmaVariant(64, 8, 512),
    _SPLIT: MmaVariant(64, 1, float("inf")),
}
"""The first one with enough columns is taken."""


@dataclass(frozen=True, slots=True)
class MmaFamilySizes(FamilySizes):
    """The w4a16_mma and w8a16_mma kernels: ``mma.sync`` by single warps.

    A stage contains :attr:`stage_blocks` blocks of 64 rows, :attr:`codes_bytes` of codes each. Whole rows of x have
    their own shared memory, or with one team a stage has their columns (:class:`Budget`). With :attr:`short_k` there
    are, for the down projection, whose K may be short, kernels with several teams, in which a stage has all columns.
    """

    consumer_warps: int = 16
    producer_warps: int = 2
    stage_blocks: int = 8
    short_k: bool = True

    def threads(self, block_m: int) -> int:
        """Return the threads of a CTA: one producer warp for weights, one for x, and the consumers."""
        return (self.consumer_warps + self.producer_warps) * 32

    def stage_bytes(self, format: str, block_m: int) -> int:
        """Return the bytes of a pipeline stage: codes and scales of weights."""
        sizes = self.formats[format] or _NO_SCALES
        return self.stage_blocks * self.codes_bytes + self.stage_blocks // sizes.scale_blocks * sizes.scale_bytes

    def variants(self, part: str) -> tuple[str, ...]:
        """Return the variants of a part's kernels."""
        return tuple(_MMA_VARIANTS) if part == "down" and self.short_k else (_SPLIT,)

    def variant(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> str:
        """Return the first variant for ``k`` columns whose stages fit."""
        *short, last = self.variants(part)
        for name in short:
            if k <= self.mma_variant(name).most_k and self._pipeline(budget, format, name, block_m, k).stages:
                return name
        return last

    def mma_variant(self, name: str) -> MmaVariant:
        """Return a variant by its name."""
        return _MMA_VARIANTS[name]

    def pipeline(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> Pipeline:
        """Return the pipeline for rows of x with ``k`` columns.

        Of whole rows of x there are two buffers if more than :data:`MIN_STAGES` stages fit as well, else one.
        """
        return self._pipeline(budget, format, self.variant(budget, format, part, block_m, k), block_m, k)

    def _pipeline(self, budget: Budget, format: str, variant: str, block_m: int, k: int) -> Pipeline:
        stage, teams = self.stage_bytes(format, block_m), _MMA_VARIANTS[variant].teams
        # Partial sums of 32 rows by 8 rows of x per warp.
        sums = self.consumer_warps * round_up(block_m, 8) // 8 * 1024 if teams == 1 else 0
        room = budget.shared_bytes - self.static_bytes - sums - 128
        if budget.x_in_stages and teams == 1:
            columns = self.stage_blocks * (self.formats[format] or _NO_SCALES).columns
            x_bytes = block_m * (2 * columns + 16)  # rows start four banks apart
            stages = min(room // (stage + x_bytes), MAX_STAGES)
            return Pipeline(stages, 0, sums + 128 + stages * (stage + x_bytes))
        x_bytes, stages, buffers = block_m * (2 * k + 16), 0, 0
        for buffers in (2, 1):
            stages = (room - buffers * x_bytes) // stage
            if stages > MIN_STAGES:
                break
        stages = min(stages, MAX_STAGES) // teams * teams
        return Pipeline(stages, buffers, sums + buffers * x_bytes + 128 + stages * stage)

    def fits(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> bool:
        """Return whether enough stages fit in shared memory with the rows of x: see :data:`MIN_STAGES`."""
        return self.pipeline(budget, format, part, block_m, k).stages >= MIN_STAGES - budget.x_in_stages


@dataclass(frozen=True, slots=True)
class FewRowsFamilySizes(FamilySizes):
    """The w8a8_mma kernels: ``mma.sync`` by single warps, each with a pipeline of its own, without producer warps.

    A stage contains a block of 32 rows by 128 columns for every warp. There are two buffers of the warps' sums and, if
    these are :attr:`ordered`, of what they are multiplied by. Rows of x are rounded to E4M3 by each group of warps that
    share a block of weights along K.

    Attributes:
        warps: warps of a CTA.
        most_stages: most pipeline stages.
        ordered: whether sums add K in order, as those of w8a8_f16 do.
    """

    warps: int = 16
    most_stages: int = 2
    ordered: bool = False

    def threads(self, block_m: int) -> int:
        """Return the threads of a CTA."""
        return self.warps * 32

    def stage_bytes(self, format: str, block_m: int) -> int:
        """Return the bytes of a stage of all warps."""
        tile = self.tiles[block_m]
        return self.warps * tile.block_n * tile.block_k

    def pipeline(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> Pipeline:
        """Return the pipeline with as many stages as fit in shared memory."""
        # The layout, which is asked later, refuses a K that is not a multiple of a block.
        stage, k_blocks = self.stage_bytes(format, block_m), -(-k // E4M3_BLOCK_K)
        groups = self.warps // min(self.warps, 1 << k_blocks.bit_length() - 1)
        sums = self.warps * (self.tiles[block_m].block_n * block_m * 4 + (block_m * 8 if self.ordered else 0))
        beside = 2 * sums + groups * k_blocks * block_m * E4M3_ROW_BYTES
        stages = min((budget.shared_bytes - self.static_bytes - beside) // stage, self.most_stages)
        return Pipeline(stages, 1, stages * stage + beside)

    def fits(self, budget: Budget, format: str, part: str, block_m: int, k: int) -> bool:
        """Return whether a stage fits in shared memory with the rows of x, and a warp's scales in 16 lanes."""
        stages = self.pipeline(budget, format, part, block_m, k).stages
        return stages >= 1 and k // E4M3_BLOCK_K <= 16 * self.warps


@dataclass(frozen=True, slots=True)
class OrderedMmaFamilySizes(MmaFamilySizes):
    """The w4a16_mma kernels whose sums add K in order, as those of w4a16_wgmma do.

    For any K, teams have a warp for each 16 rows of weights, and a stage has the columns of x as well.
    """

    def variants(self, part: str) -> tuple[str, ...]:
        """Return the variants of a part's kernels. The one for any K, whose name is empty, is the last."""
        return (*(name for name in _MMA_VARIANTS if part == "down" and name != _SPLIT), "")

    def mma_variant(self, name: str) -> MmaVariant:
        """Return a variant by its name."""
        return _MMA_VARIANTS[name] if name else MmaVariant(64, self.consumer_warps // 4, float("inf"))

    def _pipeline(self, budget: Budget, format: str, variant: str, block_m: int, k: int) -> Pipeline:
        if variant:
            return MmaFamilySizes._pipeline(self, budget, format, variant, block_m, k)
        stage = self.stage_bytes(format, block_m) + block_m * (2 * self.stage_blocks * 64 + 16)
        teams, room = self.mma_variant("").teams, budget.shared_bytes - self.static_bytes - 128
        stages = min(room // stage, MAX_STAGES) // teams * teams
        return Pipeline(stages, 0, 128 + stages * stage)


def _tiles(*tiles: CtaTile) -> dict[int, CtaTile]:
    return {tile.block_m: tile for tile in tiles}


_ALL, _GATED = ("gate_up", "up", "down"), ("gate_up", "down")

W4A16_MMA = MmaFamilySizes(
    "w4a16_mma",
    W4_FORMATS,
    _tiles(CtaTile(8, 64, 512, 0), CtaTile(12, 64, 512, 0), CtaTile(16, 64, 512, 0)),
    _ALL,
    codes_bytes=2048,
    x_bytes=0,
    block_ns=(64,),
)
"""4-bit weights decoded to bfloat16 for ``mma.sync``, for few rows per expert."""

W4A16_MMA_ORDERED = OrderedMmaFamilySizes(
    "w4a16_mma_ordered", W4_FORMATS, _tiles(CtaTile(8, 64, 512, 0)), _ALL, codes_bytes=2048, x_bytes=0,
    static_bytes=1024, block_ns=(64,), source="w4a16_mma",
)  # fmt: skip
"""The same, with sums in the order of w4a16_wgmma's."""

# One tile for all rows: a width for every 16 of them costs little code. Four stages fit in 99 KB.
W4A16_MMA_TILED = FamilySizes(
    "w4a16_mma_tiled",
    W4_FORMATS,
    _tiles(CtaTile(96, 256, 64, 2, (16, 32, 48, 64, 80))),
    _ALL,
    codes_bytes=2048,
    x_bytes=128,
)
"""4-bit weights decoded to bfloat16 in registers, for ``mma.sync``, for many rows per expert on GPUs without wgmma."""

# Sizes are the fastest measured: many rows of weights per CTA for few rows of x.
W4A16_WGMMA = FamilySizes(
    "w4a16_wgmma",
    W4_FORMATS,
    _tiles(
        CtaTile(32, 512, 128, 4, (16,)),
        CtaTile(64, 256, 128, 4, (32, 48)),
        CtaTile(128, 256, 128, 2, (48, 96)),
        CtaTile(256, 128, 64, 2, (96, 160, 192, 224)),
    ),
    _ALL,
    codes_bytes=2048,
    x_bytes=128,
)
"""4-bit weights decoded to bfloat16 in registers, for ``wgmma``."""

_W8_FORMATS = {"mxfp8": WeightFormat("Mxfp8", 64, 1, columns=32)}
W8A16_MMA = replace(W4A16_MMA, name="w8a16_mma", source="w4a16_mma", formats=_W8_FORMATS, short_k=False)
W8A16_MMA_TILED = replace(
    W4A16_MMA_TILED, name="w8a16_mma_tiled", source="w4a16_mma_tiled", formats=_W8_FORMATS, codes_bytes=4096
)
W8A16_WGMMA = replace(W4A16_WGMMA, name="w8a16_wgmma", source="w4a16_wgmma", formats=_W8_FORMATS, codes_bytes=4096)
"""E4M3 weights with E8M0 scales, decoded to bfloat16 by the same kernels."""

# With a gate, 256 rows of weights are 128 columns of h, which share a scale. Scratch memory contains a table of
# magnitudes, and the amax of each row of h for three alternating tiles.
W4A8 = FamilySizes(
    "w4a8",
    {"mxfp4": W4_FORMATS["mxfp4"]},
    _tiles(
        CtaTile(16, 256, 256, 4, (8,)),
        CtaTile(32, 256, 256, 4, (8, 16, 24)),
        CtaTile(64, 256, 256, 4, (32, 48)),
        CtaTile(128, 256, 128, 2, (32, 64, 96, 112)),
    ),
    _GATED,
    codes_bytes=2048,
    x_bytes=E4M3_ROW_BYTES // 2,
    scratch_bytes=128,
    scratch_row_bytes=12,
)
"""MXFP4 weights decoded to E4M3 in registers, rows in E4M3."""

# Scratch memory contains a table and, for each of up to 16 warps, the scales of the work tile's rows. A turn of the
# main loop is as many stages as are added up in E4M3, so a stage has 128 columns: of INT4 one group, whose scale is in
# float32, with the zero point in its last bits.
_INT4_ROWS = {f"int4_g128{zp}": WeightFormat(f"Int4ToE4m3<{'true' if zp else 'false'}>", 256, 2) for zp in ("", "_zp")}
W4A8_ROWS = FamilySizes(
    "w4a8_rows", {"mxfp4": replace(W4_FORMATS["mxfp4"], cpp="Mxfp4ToE4m3"), **_INT4_ROWS},
    _tiles(
        CtaTile(32, 256, 128, 4, (8, 16, 24)), CtaTile(64, 256, 128, 4, (32, 48)),
        CtaTile(128, 256, 128, 2, (32, 64, 96, 112)),
    ), _GATED, codes_bytes=2048, x_bytes=E4M3_ROW_BYTES // 2, scratch_bytes=256, scratch_row_bytes=64,
    source="w4a8_rows",
)  # fmt: skip
"""The same with one scale for a row of x."""

BF16 = FamilySizes(
    "bf16", {"bf16": None}, _tiles(
        CtaTile(32, 128, 128, 2, (8, 16, 24)),
        CtaTile(64, 128, 128, 2, (16, 32, 48)),
        CtaTile(128, 256, 64, 2, (32, 64, 96)),
        CtaTile(160, 256, 64, 2, (32, 64, 96, 128)),
        CtaTile(320, 128, 64, 2, (64, 128, 192, 256, 272, 288)),
    ), _ALL, codes_bytes=8192, x_bytes=128,
)  # fmt: skip
"""bfloat16 weights, read by ``wgmma`` as they are."""

_BARRIER_BYTES = 16 * (MAX_STAGES + 1)  # two for each stage, and two that alternate the warpgroups
_QUEUE_BYTES = 28 * MAX_STAGES + 160  # a barrier and a tile for each stage; a tile for each of eight warps

# A warp's blocks are 32 rows by 128 columns of weights.
W8A8_MMA = FewRowsFamilySizes(
    "w8a8_mma", {"fp8_block128": None}, _tiles(CtaTile(8, 32, 128, 0)), _GATED, codes_bytes=4096, x_bytes=0,
    scales="kBlock128",
)  # fmt: skip
"""E4M3 weights, and rows rounded to E4M3, both converted to float16 for ``mma.sync``, for few rows per expert."""

W8A8_MMA_ORDERED = replace(W8A8_MMA, name="w8a8_mma_ordered", source="w8a8_mma", ordered=True)
"""The same, with sums in the order of w8a8_f16's."""

# A stage contains two scales for each row of x. Static memory contains a maximum per consumer warp, and two scales.
W8A8_F16 = FamilySizes(
    "w8a8_f16",
    {"fp8_block128": None},
    _tiles(
        CtaTile(32, 256, 128, 2, (16,)),
        CtaTile(64, 256, 128, 2, (32, 48)),
        CtaTile(96, 256, 128, 2, (48, 64, 80)),
    ),
    _GATED,
    codes_bytes=4096,
    x_bytes=128,
    row_bytes=8,
    static_bytes=_BARRIER_BYTES,
    static_row_bytes=40,
    scales="kBlock128",
)
"""E4M3 weights and rows, both converted to float16, whose sums are exact."""

# A stage contains a scale for each row of x, and where rounding leaves room two of weights. Static memory contains the
# amax of each row of h for three alternating tiles.
W8A8 = FamilySizes(
    "w8a8", {"fp8_block128": None}, _tiles(CtaTile(160, 256, 128, 2, (32, 64, 80, 96, 112, 128))),
    (*_GATED, "gate_up_tiles"),
    codes_bytes=4096, x_bytes=64, row_bytes=4, static_bytes=_BARRIER_BYTES + _QUEUE_BYTES, static_row_bytes=12,
    scales="kBlock128",
)  # fmt: skip
"""E4M3 weights and rows, multiplied in E4M3. Sums of 128 columns have 14 bits."""


def _by_channel(family: FamilySizes, *tiles: CtaTile) -> FamilySizes:
    """Return the family for one scale for a row of weights and one for a row of x. Experts need no gate."""
    return replace(
        family, name=f"{family.name}_channel", source=family.source or family.name, scales="kChannel",
        formats={"fp8_channel": None}, parts=_ALL, tiles=_tiles(*tiles) if tiles else family.tiles,
    )  # fmt: skip


W8A8_MMA_CHANNEL = _by_channel(W8A8_MMA)
W8A8_MMA_ORDERED_CHANNEL = _by_channel(W8A8_MMA_ORDERED)
W8A8_F16_CHANNEL = _by_channel(W8A8_F16, CtaTile(32, 256, 128, 2, (16,)))
W8A8_CHANNEL = _by_channel(W8A8)

FAMILIES: dict[str, FamilySizes] = {
    f.name: f
    for f in (
        *(W4A16_MMA, W4A16_MMA_ORDERED, W4A16_MMA_TILED, W4A16_WGMMA, W4A8, W4A8_ROWS),
        *(W8A16_MMA, W8A16_MMA_TILED, W8A16_WGMMA, BF16),
        *(W8A8_MMA, W8A8_MMA_ORDERED, W8A8_F16, W8A8),
        *(W8A8_MMA_CHANNEL, W8A8_MMA_ORDERED_CHANNEL, W8A8_F16_CHANNEL, W8A8_CHANNEL),
    )
}
"""Sizes of all kernel families by name."""
