"""How warps of a grouped GEMM share work and shared memory: by warpgroup, by team of warps, or each warp for itself.

Each class says for a tile and a weight format how many stages its pipeline has, how many bytes they take, and which
arguments the kernel's template has. A static assertion in C++ checks the bytes of a stage.

M is the number of tokens; N and K are the rows and columns of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

STATIC_BYTES = 2048
"""Static shared memory that is reserved unless a kernel specifies its own."""

ALIGNMENT = 1024
"""Alignment of stages in bytes: the period of 128-byte swizzling."""

MAX_STAGES = 16
"""Most pipeline stages: the number of pairs of mbarriers in a kernel."""

MIN_STAGES = 3
"""Fewest stages with which teams of warps are used where whole rows of x lie beside them; else one less."""

E4M3_BLOCK_K = 128
"""Columns of x or h that share a scale, and those of a tile of permuted E4M3 rows."""

E4M3_ROW_BYTES = E4M3_BLOCK_K + 4
"""Bytes of a row in such a tile: codes and a float32 scale."""

_BLOCK_BYTES = 2048
"""Bytes of the codes of a block of weights, which has 64 rows."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def e4m3_row_bytes(columns: int) -> int:
    """Return the bytes of an E4M3 row outside of tiles: codes, then float32 scales, padded to 16 bytes."""
    return columns + round_up(columns // 32, 16)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format as the kernels read it.

    Attributes:
        cpp: name of its C++ type in ``dequant/``; empty where a kernel reads one format only.
        columns: columns of a block, which with 64 rows is 2 KiB of codes.
        scale_bytes: bytes of scales for 64 rows and ``scale_blocks`` times ``columns`` columns of weights; 0 where
            scales do not pass through a stage.
        scale_blocks: blocks of ``columns`` columns that share a block of scales.
        cvt: the C++ type where a GPU converts its codes and scales by instructions; empty if none does.
    """

    cpp: str = ""
    columns: int = 64
    scale_bytes: int = 0
    scale_blocks: int = 1
    cvt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    warpgroups: int = 0
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
    """Pipeline stages of a launch, its separate buffers of x (w4a16_mma), its bytes of dynamic shared memory, and the
    variant of the kernel."""

    stages: int
    x_buffers: int
    shared_bytes: int
    variant: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpgroupPipeline:
    """Four producer warps fill stages with weights and rows of x for all consumer warpgroups. Every K fits.

    Attributes:
        x_bytes: bytes of 64 columns of a row of x.
        row_bytes: further bytes for each row of x in a stage.
        scratch_bytes, scratch_row_bytes: bytes of dynamic shared memory after the stages, and per row of x.
        static_bytes, static_row_bytes: bytes of static shared memory, and per row of x.
    """

    x_bytes: int
    row_bytes: int = 0
    scratch_bytes: int = 0
    scratch_row_bytes: int = 0
    static_bytes: int = STATIC_BYTES
    static_row_bytes: int = 0

    def threads(self, tile: CtaTile) -> int:
        """Return the threads of a CTA."""
        return tile.warpgroups * 128 + 128

    def stage_bytes(self, weights: WeightFormat, tile: CtaTile) -> int:
        """Return the bytes of a stage: codes and scales of weights, x and its scales."""
        codes = tile.block_k // weights.columns * _BLOCK_BYTES
        scales = -(-tile.block_k // (weights.columns * weights.scale_blocks)) * weights.scale_bytes
        x = tile.block_m * (tile.k_blocks * self.x_bytes + self.row_bytes)
        return round_up(tile.block_n // 64 * (codes + scales) + x, ALIGNMENT)

    def variants(self, part: str) -> tuple[str, ...]:
        """Return the names of a part's variants: there is one, without a name."""
        return ("",)

    def pipeline(self, budget: Budget, weights: WeightFormat, part: str, tile: CtaTile, k: int) -> Pipeline:
        """Return the pipeline with as many stages as fit in shared memory."""
        stage = self.stage_bytes(weights, tile)
        beside = self.scratch_bytes + self.scratch_row_bytes * tile.block_m + ALIGNMENT
        static = self.static_bytes + self.static_row_bytes * tile.block_m
        stages = min((budget.shared_bytes - static - beside) // stage, MAX_STAGES)
        return Pipeline(stages, 1, stages * stage + beside)

    def fits(self, budget: Budget, weights: WeightFormat, part: str, tile: CtaTile, k: int) -> bool:
        """Return True: stages contain a part of x's columns, so that every ``k`` fits in shared memory."""
        return True

    def template(self, weights: WeightFormat, tile: CtaTile, variant: str) -> Sequence[object]:
        """Return the template's consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns in a
        stage, bytes of a stage, block_m, and smaller widths for fewer rows of x."""
        return (
            tile.warpgroups,
            tile.n_blocks,
            tile.k_blocks,
            self.stage_bytes(weights, tile),
            tile.block_m,
            *tile.widths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamVariant:
    """How teams of warps share work in one of the kernels.

    Attributes:
        name: at the end of the kernel's name.
        block_n: rows of weights in a tile.
        teams: teams of warps that have tiles of their own. One team divides K between its warps.
        most_k: most columns of weights.
        x_in_stages: whether stages have the columns of x on every GPU.
    """

    name: str
    block_n: int = 64
    teams: int = 1
    most_k: float = float("inf")
    x_in_stages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPipeline:
    """Single warps multiply by ``mma.sync``. A producer warp copies blocks of weights, another one x.

    A stage contains :attr:`stage_blocks` blocks of weights. Whole rows of x have their own shared memory, or a stage
    has their columns (:class:`Budget`). K of the down projection may be short: with few columns, a stage of a team has
    all of them.

    Attributes:
        down: the kernels of the down projection; the first one with enough columns and shared memory is taken. The
            last one is that of the other parts, too.
        ordered: whether sums add K in order, as those of w4a16_wgmma do. Teams have a warp for each 16 rows of weights
            then, and the variants for short K nothing to change.
        static_bytes: bytes of static shared memory.
    """

    down: tuple[TeamVariant, ...]
    ordered: bool = False
    static_bytes: int = STATIC_BYTES
    consumer_warps: ClassVar = 16
    producer_warps: ClassVar = 2
    stage_blocks: ClassVar = 8

    def threads(self, tile: CtaTile) -> int:
        """Return the threads of a CTA: one producer warp for weights, one for x, and the consumers."""
        return (self.consumer_warps + self.producer_warps) * 32

    def stage_bytes(self, weights: WeightFormat, tile: CtaTile) -> int:
        """Return the bytes of a pipeline stage: codes and scales of weights."""
        return self.stage_blocks * _BLOCK_BYTES + self.stage_blocks // weights.scale_blocks * weights.scale_bytes

    def variants(self, part: str) -> tuple[str, ...]:
        """Return the names of a part's variants."""
        return tuple(variant.name for variant in (self.down if part == "down" else self.down[-1:]))

    def pipeline(self, budget: Budget, weights: WeightFormat, part: str, tile: CtaTile, k: int) -> Pipeline:
        """Return the pipeline of the first variant for rows of x with ``k`` columns whose stages fit.

        Of whole rows of x there are two buffers if more than :data:`MIN_STAGES` stages fit as well, else one.
        """
        *short, last = self.down if part == "down" else self.down[-1:]
        for variant in short:
            if k <= variant.most_k and (found := self._pipeline(budget, weights, variant, tile, k)).stages:
                return found
        return self._pipeline(budget, weights, last, tile, k)

    def _pipeline(self, budget: Budget, weights: WeightFormat, variant: TeamVariant, tile: CtaTile, k: int) -> Pipeline:
        stage, block_m, splits = self.stage_bytes(weights, tile), tile.block_m, variant.teams == 1
        # Partial sums of 32 rows by 8 rows of x per warp.
        beside = (self.consumer_warps * 1024 if splits else 0) + 128
        room = budget.shared_bytes - self.static_bytes - beside
        buffers = 0
        if variant.x_in_stages or (budget.x_in_stages and splits):
            stage += block_m * (2 * self.stage_blocks * weights.columns + 16)  # rows start four banks apart
            stages = room // stage
        else:
            x_bytes, stages = block_m * (2 * k + 16), 0
            for buffers in (2, 1):
                stages = (room - buffers * x_bytes) // stage
                if stages > MIN_STAGES:
                    break
            beside += buffers * x_bytes
        stages = min(stages, MAX_STAGES) // variant.teams * variant.teams
        return Pipeline(stages, buffers, beside + stages * stage, variant.name)

    def fits(self, budget: Budget, weights: WeightFormat, part: str, tile: CtaTile, k: int) -> bool:
        """Return whether enough stages fit in shared memory with the rows of x: see :data:`MIN_STAGES`."""
        return self.pipeline(budget, weights, part, tile, k).stages >= MIN_STAGES - budget.x_in_stages

    def template(self, weights: WeightFormat, tile: CtaTile, variant: str) -> Sequence[object]:
        """Return the template's block_n, teams of warps, bytes of a stage, and whether sums are ordered."""
        (v,) = (v for v in self.down if v.name == variant)
        numbers = v.block_n, v.teams, self.stage_bytes(weights, tile)
        return (*numbers, "true") if self.ordered else numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpPipeline:
    """Each warp multiplies by ``mma.sync`` what it copied itself; rows of x are rounded in the kernel.

    A stage contains a block of 32 rows by 128 columns for every warp. There are two buffers of the warps' sums and, if
    these are :attr:`ordered`, of what they are multiplied by. Rows of x are rounded to E4M3 by each group of warps that
    share a block of weights along K.

    Attributes:
        ordered: whether sums add K in order, as those of w8a8_f16 do.
    """

    ordered: bool = False
    warps: ClassVar = 16
    most_stages: ClassVar = 2

    def threads(self, tile: CtaTile) -> int:
        """Return the threads of a CTA."""
        return self.warps * 32

    def stage_bytes(self, weights: WeightFormat, tile: CtaTile) -> int:
        """Return the bytes of a stage of all warps."""
        return self.warps * tile.block_n * tile.block_k

    def variants(self, part: str) -> tuple[str, ...]:
        """Return the names of a part's variants: there is one, without a name."""
        return ("",)

    def pipeline(self, budget: Budget, weights: WeightFormat, part: str, tile: CtaTile, k: int) -> Pipeline:
        """Return the pipeline with as many stages as fit in shared memory."""
        # The layout, which is asked later, refuses a K that is not a multiple of a block.
        stage, k_blocks = self.stage_bytes(weights, tile), -(-k // E4M3_BLOCK_K)
        groups = self.warps // min(self.warps, 1 << k_blocks.bit_length() - 1)
        sums = self.warps * (tile.block_n * tile.block_m * 4 + (tile.block_m * 8 if self.ordered else 0))
        beside = 2 * sums + groups * k_blocks * tile.block_m * E4M3_ROW_BYTES
        stages = min((budget.shared_bytes - STATIC_BYTES - beside) // stage, self.most_stages)
        return Pipeline(stages, 1, stages * stage + beside)

    def fits(self, budget: Budget, weights: WeightFormat, part: str, tile: CtaTile, k: int) -> bool:
        """Return whether a stage fits in shared memory with the rows of x, and a warp's scales in 16 lanes."""
        stages = self.pipeline(budget, weights, part, tile, k).stages
        return stages >= 1 and k // E4M3_BLOCK_K <= 16 * self.warps

    def template(self, weights: WeightFormat, tile: CtaTile, variant: str) -> Sequence[object]:
        """Return the template's warps, bytes of a stage, and whether sums are ordered."""
        numbers = self.warps, self.stage_bytes(weights, tile)
        return (*numbers, "true") if self.ordered else numbers
