"""How the Triton backend cuts its products: the values, the heuristic, and what tuning tries. Loads no kernel.

Both products are tiled alike: rows of one expert's weights by the routed rows that chose it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polymoe.formats import Encoding
from polymoe.machine import Machine
from polymoe.planning.cost import cost
from polymoe.planning.plan import Config
from polymoe.problem import Problem

__all__ = ["PLANES", "Tile", "TritonConfig", "heuristic"]

PLANES = {"e2m1": 4, "int4": 4, "e4m3": 2, "bf16": 1, "fp16": 1}
"""Columns that one word of codes holds."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One product's tile: rows of weights by columns a step, warps, stages of the load pipeline, splits of K, and most
    registers a thread (None: as the compiler likes)."""

    rows: int = 64
    columns: int = 128
    warps: int = 4
    stages: int = 3
    splits: int = 1
    registers: int | None = None

    def __str__(self) -> str:
        split = f" / {self.splits}" if self.splits > 1 else ""
        cap = f", {self.registers} registers" if self.registers else ""
        return f"{self.rows}x{self.columns}{split}, {self.warps} warps, {self.stages} stages{cap}"


@dataclass(frozen=True, slots=True)
class TritonConfig(Config):
    """Routed rows a tile, and the tiles of both products."""

    tokens: int = 16
    up: Tile = Tile()
    down: Tile = Tile()


# Rows a tile, by the mean number of rows of an expert that has any: the first bound at least as large.
_TOKENS = ((8, 8), (16, 16), (40, 32), (64, 64))
_MOST_TOKENS = 128
_MOST_TOKENS_IN_REGISTERS = 64
"""Wider tiles spill on GPUs whose matrix units take both operands from registers (SM80, SM89, SM120), and where FP8's
block scales need a second accumulator."""

# Tiles of gate and up, and of down, by bits of an element and rows a tile: the best on one H200. Up to 8 rows a tile
# (and with two warps) the products are made by mma.sync, which wants no synchronization of warps.
_TILES: dict[int, dict[int, tuple[Tile, Tile]]] = {
    4: {
        8: (Tile(64, 256), Tile(64, 256)),
        16: (Tile(32, 256, 2), Tile(64, 128, 2)),
        32: (Tile(64, 128), Tile(128, 128)),
        64: (Tile(64, 128), Tile(128, 128)),
        128: (Tile(64, 128), Tile(128, 128, 8)),
    },
    8: {
        8: (Tile(64, 128), Tile(64, 128)),
        16: (Tile(64, 128), Tile(64, 128)),
        32: (Tile(64, 128), Tile(64, 128)),
        64: (Tile(64, 128), Tile(128, 128, 8)),
    },
    16: {
        8: (Tile(32, 128, 2, 4), Tile(64, 128)),
        16: (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
        32: (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
        64: (Tile(128, 64, 8, 4), Tile(128, 64, 8, 4)),
        128: (Tile(128, 64, 8, 4), Tile(128, 64, 8)),
    },
}


def heuristic(problem: Problem, machine: Machine, tokens: int) -> TritonConfig:
    """Tiles by the mean number of rows that an expert with any rows gets, made to fit into shared memory."""
    spec = problem.spec
    c = cost(problem, machine.device, tokens)
    mean = tokens * problem.top_k * spec.local_experts / spec.experts / max(c.active_experts, 1e-9)
    wide = machine.device.sm // 10 in (9, 10) and 8 not in (spec.up.bits, spec.down.bits)
    most = _MOST_TOKENS if wide else _MOST_TOKENS_IN_REGISTERS
    block = next((t for bound, t in _TOKENS if mean <= bound), most)
    limit = machine.device.shared_memory_bytes
    return TritonConfig(
        block,
        _fit(_TILES[spec.up.bits][block][0], spec.up, 2 if spec.gated else 1, block, limit),
        _fit(_TILES[spec.down.bits][block][1], spec.down, 1, block, limit),
    )


def _fit(tile: Tile, encoding: Encoding, matrices: int, tokens: int, limit: int) -> Tile:
    """The tile with fewer stages, then fewer columns, until its pipeline fits into ``limit`` bytes."""

    def nbytes(t: Tile) -> int:
        weights = matrices * t.rows * t.columns * encoding.bits // 8
        # The result passes through shared memory on its way out.
        return t.stages * (weights + t.columns * tokens * 2) + t.rows * tokens * 4

    least = 16 * PLANES[encoding.element]  # a plane of a step is at least one instruction's 16 columns
    while nbytes(tile) > limit and (tile.stages > 2 or tile.columns > least):
        tile = replace(tile, stages=tile.stages - 1) if tile.stages > 2 else replace(tile, columns=tile.columns // 2)
    return tile
