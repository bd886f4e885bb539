"""How the Triton backend cuts its products: the values, the heuristic, and what tuning tries. Loads no kernel.

Both products are tiled alike: rows of one expert's weights by the routed rows that chose it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import log2

from polymoe.errors import PlanError
from polymoe.formats import Encoding
from polymoe.machine import Machine
from polymoe.planning.cost import cost
from polymoe.planning.plan import Config
from polymoe.problem import Problem

__all__ = ["PLANES", "Tile", "TritonConfig", "candidates", "heuristic"]

PLANES = {"e2m1": 4, "int4": 4, "e4m3": 2, "bf16": 1, "fp16": 1}
"""Columns that one word of codes holds."""


def _need_power_of_two(where: str, value: int, least: int) -> None:
    if value < least or value & (value - 1):
        raise PlanError(where, expected=f"a power of two of at least {least}", got=str(value))


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

    def __post_init__(self) -> None:
        for name, least in (("rows", 16), ("columns", 16), ("warps", 1), ("splits", 1)):
            _need_power_of_two(f"Tile.{name}", getattr(self, name), least)
        if self.stages < 1 or (self.registers is not None and self.registers < 1):
            raise PlanError("Tile", expected="stages and registers of at least 1", got=str(self))

    def __str__(self) -> str:
        split = f" / {self.splits}" if self.splits > 1 else ""
        cap = f", {self.registers} registers" if self.registers else ""
        return f"{self.rows}x{self.columns}{split}, {self.warps} warps, {self.stages} stages{cap}"


@dataclass(frozen=True, slots=True)
class TritonConfig(Config):
    """Routed rows a tile, the tiles of both products, rows at most of a tile that is computed narrower (0: none), and
    whether launches are chained (programmatic dependent launch, SM90 and newer)."""

    tokens: int = 16
    up: Tile = Tile()
    down: Tile = Tile()
    tail: int = 0
    chained: bool = False

    def __post_init__(self) -> None:
        _need_power_of_two("TritonConfig.tokens", self.tokens, 8)

    def __str__(self) -> str:
        rest = (f", tail={self.tail}" if self.tail else "") + (", chained" if self.chained else "")
        return f"tokens={self.tokens}, up={self.up}, down={self.down}{rest}"


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
    return _of_block(problem, machine, next((t for bound, t in _TOKENS if mean <= bound), _most(problem, machine)))


def _most(problem: Problem, machine: Machine) -> int:
    """Most rows a tile."""
    wide = machine.device.sm // 10 in (9, 10) and 8 not in (problem.spec.up.bits, problem.spec.down.bits)
    return _MOST_TOKENS if wide else _MOST_TOKENS_IN_REGISTERS


def _of_block(problem: Problem, machine: Machine, block: int) -> TritonConfig:
    """The heuristic's tiles for ``block`` rows a tile."""
    up, down = _sides(problem, machine)
    return TritonConfig(block, up.fit(_TILES[up.bits][block][0], block), down.fit(_TILES[down.bits][block][1], block))


@dataclass(frozen=True, slots=True)
class _Side:
    """What a tile of one product must fit: encoding, matrices (gate and up are two), and the GPU's shared memory."""

    encoding: Encoding
    matrices: int
    limit: int

    @property
    def bits(self) -> int:
        return self.encoding.bits

    @property
    def least_columns(self) -> int:
        """A plane of a step is at least one instruction's 16 columns."""
        return 16 * PLANES[self.encoding.element]

    def nbytes(self, t: Tile, block: int) -> int:
        """Shared memory of a tile."""
        weights = self.matrices * t.rows * t.columns * self.bits // 8
        # The result passes through shared memory on its way out.
        return t.stages * (weights + t.columns * block * 2) + t.rows * block * 4

    def fit(self, tile: Tile, block: int) -> Tile:
        """The tile with fewer stages, then fewer columns, until its pipeline fits."""
        while self.nbytes(tile, block) > self.limit and (tile.stages > 2 or tile.columns > self.least_columns):
            less = {"stages": tile.stages - 1} if tile.stages > 2 else {"columns": tile.columns // 2}
            tile = replace(tile, **less)
        return tile

    def tiles(self, block: int) -> Iterator[Tile]:
        """Tiles that may be tried: those that fit, and whose accumulators and decoded weights fit into registers."""
        for rows in (32, 64, 128):
            for columns in (64, 128, 256):
                for warps in (2, 4, 8):
                    threads = 32 * warps
                    registers = self.matrices * rows * block / threads + rows * columns / 2 / threads
                    scaled = self.encoding.group_columns if self.bits == 8 else 1  # one scale a step at most
                    if registers > 160 or columns < self.least_columns or 1 < scaled < columns:
                        continue
                    for stages in (2, 3, 4):
                        tile = Tile(rows, columns, warps, stages)
                        if self.nbytes(tile, block) <= self.limit:
                            yield tile


def _sides(problem: Problem, machine: Machine) -> tuple[_Side, _Side]:
    spec, limit = problem.spec, machine.device.shared_memory_bytes
    return _Side(spec.up, 2 if spec.gated else 1, limit), _Side(spec.down, 1, limit)


_NEAR, _FEW = 10, 3
"""Tiles of each product tried at the likeliest number of rows a tile, and at its neighbours."""


def candidates(
    problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
) -> list[TritonConfig]:
    """What tuning tries: see :meth:`polymoe.backends.Backend.candidates`.

    First the heuristic, other numbers of rows a tile, and around each one field changed at a time: the products run
    one after the other, so that not every pair of tiles needs a try. Then the best of each field together, and what
    lies around the best so far.
    """
    own = heuristic(problem, machine, tokens)
    if not timed:
        blocks = [b for b in (own.tokens, 2 * own.tokens, own.tokens // 2) if 8 <= b <= _most(problem, machine)]
        found = [_of_block(problem, machine, b) for b in blocks]
        for b, hub in zip(blocks, list(found), strict=True):
            found += _around(problem, machine, hub, _NEAR if b == own.tokens else _FEW)
    else:
        times = {config: time for config, time in timed if isinstance(config, TritonConfig)}
        ranked = sorted(times, key=times.__getitem__)
        blocks = dict.fromkeys(config.tokens for config in ranked)
        found = [_best_of_each(_of_block(problem, machine, b), ranked) for b in blocks]
        best = ranked[0]
        if best.tokens != own.tokens:  # so far only a few tiles of this width were tried
            found += _around(problem, machine, _of_block(problem, machine, best.tokens), _NEAR)
        found += _around(problem, machine, best, _FEW)
    return list(dict.fromkeys(found))


def _best_of_each(hub: TritonConfig, ranked: Sequence[TritonConfig]) -> TritonConfig:
    """The hub with each field as in the fastest config that differs from it in that field alone."""
    best = {}
    for field in fields(hub):
        like_hub = (c for c in ranked if replace(c, **{field.name: getattr(hub, field.name)}) == hub)
        best[field.name] = getattr(next(like_hub, hub), field.name)
    return replace(hub, **{**best, "tokens": hub.tokens})


def _around(problem: Problem, machine: Machine, hub: TritonConfig, count: int) -> list[TritonConfig]:
    """The config with one field changed: a product's tile to one of the ``count`` nearest, and what else there is."""
    found: list[TritonConfig] = []
    spec, block = problem.spec, hub.tokens
    for name, side in zip(("up", "down"), _sides(problem, machine), strict=True):
        tile: Tile = getattr(hub, name)
        tiles = _nearest(tile, side.tiles(block), count)
        columns = spec.matrix_shape(name)[1]
        # Splits give few rows more programs; each should keep a pipeline's worth of steps.
        if block <= 16 and tile.splits <= 2 and columns >= 2 * tile.splits * tile.stages * tile.columns:
            tiles.append(replace(tile, splits=2 * tile.splits))
        found += [replace(hub, **{name: t}) for t in tiles]
    if machine.device.sm >= 90:
        found.append(replace(hub, chained=not hub.chained))
    found += [replace(hub, tail=t) for t in (0, block // 4, block // 2) if t != hub.tail and (t == 0 or t >= 8)]
    return found


def _nearest(tile: Tile, tiles: Iterator[Tile], count: int) -> list[Tile]:
    def distance(t: Tile) -> float:
        sizes = ((tile.rows, t.rows), (tile.columns, t.columns), (tile.warps, t.warps))
        # More rows with more warps is a smaller change than either alone would say.
        per_warp = abs(log2(tile.rows / t.rows) - log2(tile.warps / t.warps)) / 2
        return sum(abs(log2(a / b)) for a, b in sizes) + abs(tile.stages - t.stages) * 0.75 + per_warp

    return sorted((t for t in tiles if t != tile), key=distance)[:count]
