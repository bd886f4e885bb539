"""How the Triton backend cuts its products: the values, the heuristic, and what tuning tries. Loads no kernel.

Both products are tiled alike: rows of one expert's weights by the routed rows that chose it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import log2

from polymoe.backends.config import Config
from polymoe.cost import cost
from polymoe.errors import PlanError
from polymoe.formats import Encoding, PerGroup
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.shapes import ceil_div

__all__ = ["PLANES", "Tile", "TritonConfig", "decodes_in_float32", "heuristic", "smaller", "tuning_configs"]

PLANES = {"e2m1": 4, "int4": 4, "e4m3": 2, "bf16": 1, "fp16": 1}
"""Columns that one word of codes holds."""


def _need_power_of_two(where: str, value: int, least: int) -> None:
    if value < least or value & (value - 1):
        raise PlanError(where, expected=f"a power of two of at least {least}", got=str(value))


@dataclass(frozen=True, slots=True)
class Tile:
    """One product's tile: rows of weights by columns a step, warps, stages of the load pipeline, splits of K, most
    registers a thread (None: as the compiler likes), and blocks of rows that one program takes in turn (of down alone,
    where K is at most four steps)."""

    rows: int = 64
    columns: int = 128
    warps: int = 4
    stages: int = 3
    splits: int = 1
    registers: int | None = None
    blocks: int = 1

    def __post_init__(self) -> None:
        for name, least in (("rows", 16), ("columns", 16), ("warps", 1), ("splits", 1)):
            _need_power_of_two(f"Tile.{name}", getattr(self, name), least)
        if self.stages < 1 or (self.registers is not None and self.registers < 1):
            raise PlanError("Tile", expected="stages and registers of at least 1", got=str(self))

    def __str__(self) -> str:
        split = f" / {self.splits}" if self.splits > 1 else ""
        swept = f", {self.blocks} blocks" if self.blocks > 1 else ""
        cap = f", {self.registers} registers" if self.registers else ""
        return f"{self.rows}x{self.columns}{split}, {self.warps} warps, {self.stages} stages{cap}{swept}"


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

    @property
    def kernel_family(self) -> str:
        """By the kernel of the down projection, which for a short K is another one."""
        return "grouped_gemm_short_k" if self.down.blocks > 1 and self.down.splits == 1 else "grouped_gemm"

    def __str__(self) -> str:
        rest = (f", tail={self.tail}" if self.tail else "") + (", chained" if self.chained else "")
        return f"tokens={self.tokens}, up={self.up}, down={self.down}{rest}"


# Rows a tile, by the mean number of rows of an expert that has any: the first bound at least as large.
_TOKENS = ((6.5, 8), (13, 16), (26, 32), (52, 64))
_MOST_TOKENS = 128
_MOST_TOKENS_IN_REGISTERS = 64
"""Wider tiles spill on GPUs whose tensor cores take both operands from registers (SM80, SM89, SM120), and where scales
by block or group need a second accumulator (there they spill beyond half of this)."""
_MOST_ROWS_IN_REGISTERS = 64
"""Rows of weights a tile of four warps, in either case: found by compiling, see test_triton_compiles.py."""

# Tiles of gate and up, and of down, by bits of an element and rows a tile: the best on one H200. Up to 8 rows a tile
# (and with two warps) the MMA is mma.sync, which needs no synchronization of warps.
_TILES: dict[int, dict[int, tuple[Tile, Tile]]] = {
    4: {
        8: (Tile(64, 256), Tile(32, 256, 2)),
        16: (Tile(32, 256, 2, 2), Tile(64, 256)),
        32: (Tile(64, 128), Tile(64, 128)),
        64: (Tile(64, 128, 4, 2), Tile(128, 128)),
        128: (Tile(64, 128), Tile(128, 128, 4, 2)),
    },
    8: {
        8: (Tile(64, 128, 4, 4), Tile(64, 128)),
        16: (Tile(64, 128, 4, 5), Tile(64, 128)),
        32: (Tile(64, 128, 4, 4), Tile(64, 128)),
        64: (Tile(64, 128), Tile(64, 128)),
    },
    16: {
        8: (Tile(64, 128, 4, 4), Tile(32, 128, 2, 4)),
        16: (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
        32: (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
        64: (Tile(64, 64, 4, 4), Tile(128, 64)),
        128: (Tile(128, 64, 8, 4), Tile(128, 64, 8)),
    },
}
# Rows at most of a tile that is computed narrower, by rows a tile.
_TAILS = {8: 0, 16: 0, 32: 16, 64: 32, 128: 32}
_SHORT_STEPS = 4
"""Steps of K up to which down takes several blocks of rows a program, of weights that are quantized."""


def decodes_in_float32(problem: Problem) -> bool:
    """Whether the weights' scales are outside what the fast decoding in bfloat16 takes."""
    return problem.scales is not None and problem.scales.outside_bfloat16


def heuristic(problem: Problem, machine: Machine, tokens: int) -> TritonConfig:
    """Tiles by the mean number of rows that an expert with any rows gets, made to fit into shared memory."""
    mean = _mean_rows(problem, machine, tokens)[1]
    block = next((t for bound, t in _TOKENS if mean <= bound), _MOST_TOKENS)
    return _of_block(problem, machine, tokens, min(block, _most(problem, machine)))


def _mean_rows(problem: Problem, machine: Machine, tokens: int) -> tuple[float, float]:
    """Experts that have rows, and how many each of them has."""
    spec, active = problem.spec, cost(problem, machine.device, tokens).active_experts
    return active, tokens * problem.top_k * spec.local_experts / spec.experts / max(active, 1e-9)


def _most(problem: Problem, machine: Machine) -> int:
    """Most rows a tile."""
    sides = _sides(problem, machine)
    by_step, bits = any(side.by_step for side in sides), [side.bits for side in sides]
    if not _from_shared_memory(machine):
        return _MOST_TOKENS_IN_REGISTERS // 2 if by_step else _MOST_TOKENS_IN_REGISTERS
    # On SM100 Triton puts decoded 4-bit weights into tensor memory, beside the accumulators: 544 of 512 columns.
    full = by_step or 8 in bits or (4 in bits and machine.device.sm >= 100)
    return _MOST_TOKENS_IN_REGISTERS if full else _MOST_TOKENS


def _sweeps(side: _Side, machine: Machine) -> bool:
    """Whether a program may take several blocks of rows: on SM100 decoded 4-bit weights of all steps would be in tensor
    memory at once, 528 of 512 columns."""
    return side.bits != 4 or machine.device.sm // 10 != 10


def _from_shared_memory(machine: Machine) -> bool:
    """Whether tensor cores read an operand from shared memory (wgmma, tcgen05), rather than both from registers."""
    return machine.device.sm // 10 in (9, 10)


def _of_block(problem: Problem, machine: Machine, tokens: int, block: int) -> TritonConfig:
    """The heuristic's tiles for ``block`` rows a tile."""
    side_up, side_down = _sides(problem, machine)
    up = side_up.fit(_TILES[side_up.bits][block][0], block)
    down = side_down.fit(_TILES[side_down.bits][block][1], block)
    if side_down.by_step or (side_down.bits == 4 and not _from_shared_memory(machine)):
        down = replace(down, rows=min(down.rows, _MOST_ROWS_IN_REGISTERS))
    if decodes_in_float32(problem):  # four times the registers
        up, down = (replace(t, columns=min(t.columns, 64)) for t in (up, down))
    if side_up.by_step and block == 64 and machine.device.sm >= 100:
        # Accumulators of tcgen05 lie in memory of their own, but a step's must come to registers to be scaled.
        up = replace(up, warps=8)
    active, mean = _mean_rows(problem, machine, tokens)
    tiles, units = active * max(1.0, mean / block), machine.device.sms
    rows, columns = problem.spec.matrix_shape("up")
    if block == 8:
        # Few programs: split K. Where activations are quantized, the launch that sums splits is there anyway.
        wanted = (6 if problem.activations.quantized else 2) * units
        while tiles * ceil_div(rows, up.rows) * up.splits < wanted and columns >= 8 * up.splits * up.columns:
            up = replace(up, splits=2 * up.splits)
    rows, columns = problem.spec.matrix_shape("down")
    if side_down.bits < 16 and _sweeps(side_down, machine) and columns <= _SHORT_STEPS * down.columns:
        swept = tiles * ceil_div(rows, down.rows) / (16 * units)
        swept_down = replace(down, blocks=next((n for n in (14, 8, 4, 2) if n <= swept), 1))
        down = swept_down if side_down.nbytes(swept_down, block, columns) <= side_down.limit else down
    tail = 64 if block == 128 and 0.1 < mean % 128 / 128 <= 0.55 else _TAILS[block]
    return TritonConfig(block, up, down, tail, chained=machine.device.sm >= 90)


@dataclass(frozen=True, slots=True)
class _Side:
    """What a tile of one product must fit: encoding, matrices (gate and up are two), and the GPU's shared memory."""

    encoding: Encoding
    matrices: int
    limit: int
    by_step: bool
    """Whether each step's products are scaled before they are added up, which takes a second accumulator."""

    @property
    def bits(self) -> int:
        return self.encoding.bits

    def nbytes(self, t: Tile, block: int, columns: int = 0) -> int:
        """Shared memory of a tile; of one whose blocks are taken in turn, all ``columns`` of x are part."""
        if t.blocks > 1:
            weights = t.rows * columns * self.bits // 8
            return t.stages * weights + columns * block * 2 + t.rows * block * 4
        weights = self.matrices * t.rows * t.columns * self.bits // 8
        # The result passes through the same memory on its way out.
        return max(t.stages * (weights + t.columns * block * 2), t.rows * block * 4)

    def fit(self, tile: Tile, block: int) -> Tile:
        """The tile with fewer stages, then fewer columns, until its pipeline fits."""
        least = _least_columns(self.encoding)
        while self.nbytes(tile, block) > self.limit and (tile.stages > 2 or tile.columns > least):
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
                    if registers > 160 or columns < _least_columns(self.encoding) or 1 < scaled < columns:
                        continue
                    for stages in (2, 3, 4, 5):
                        tile = Tile(rows, columns, warps, stages)
                        if self.nbytes(tile, block) <= self.limit:
                            yield tile


def _least_columns(encoding: Encoding) -> int:
    """A plane of a step is at least one instruction's 16 columns."""
    return 16 * PLANES[encoding.element]


def smaller(config: TritonConfig, projection: str, encoding: Encoding) -> TritonConfig | None:
    """The next configuration whose product ``projection`` ("up" or "down") takes less shared memory, None after the
    last: what :meth:`_Side.fit` estimates, for tiles that a GPU then refused."""
    tile: Tile = getattr(config, projection)
    if tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    elif tile.blocks > 1:
        tile = replace(tile, blocks=1)
    elif tile.columns > _least_columns(encoding):
        tile = replace(tile, columns=tile.columns // 2)
    elif config.tokens > 16:
        return replace(config, tokens=config.tokens // 2, tail=0)
    elif tile.rows > 16:
        tile = replace(tile, rows=tile.rows // 2, warps=max(1, tile.warps // 2))
    else:
        return None
    return replace(config, **{projection: tile})


def _sides(problem: Problem, machine: Machine) -> tuple[_Side, _Side]:
    spec, limit = problem.spec, machine.device.shared_memory_bytes
    by_step = [
        problem.activations.group_columns is not None or (e.bits == 8 and isinstance(e.granularity, PerGroup))
        for e in (spec.up, spec.down)
    ]
    return _Side(spec.up, 2 if spec.gated else 1, limit, by_step[0]), _Side(spec.down, 1, limit, by_step[1])


_NEAR, _FEW = 10, 3
"""Tiles of each product tried at the likeliest number of rows a tile, and at its neighbours."""


def tuning_configs(
    problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
) -> list[TritonConfig]:
    """What tuning tries: see :meth:`polymoe.backends.Backend.tuning_configs`.

    First the heuristic, other numbers of rows a tile, and around each one field changed at a time: the products run
    one after the other, so that not every pair of tiles needs a try. Then the best of each field together, and what
    lies around the best so far.
    """
    own = heuristic(problem, machine, tokens)
    if not timed:
        blocks = [b for b in (own.tokens, 2 * own.tokens, own.tokens // 2) if 8 <= b <= _most(problem, machine)]
        found = [_of_block(problem, machine, tokens, b) for b in blocks]
        for b, hub in zip(blocks, list(found), strict=True):
            found += _around(problem, machine, hub, _NEAR if b == own.tokens else _FEW)
    else:
        times = {config: time for config, time in timed if isinstance(config, TritonConfig)}
        ranked = sorted(times, key=times.__getitem__)
        blocks = dict.fromkeys(config.tokens for config in ranked)
        found = [_best_of_each(_of_block(problem, machine, tokens, b), ranked) for b in blocks]
        best = ranked[0]
        if best.tokens != own.tokens:  # so far only a few tiles of this width were tried
            found += _around(problem, machine, _of_block(problem, machine, tokens, best.tokens), _NEAR)
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
        if block <= 16 and columns >= 8 * tile.splits * tile.columns:
            tiles.append(replace(tile, splits=2 * tile.splits))
        if tile.splits > 1:
            tiles.append(replace(tile, splits=tile.splits // 2))
        if name == "down" and _sweeps(side, machine) and columns <= _SHORT_STEPS * tile.columns:
            swept = [replace(tile, splits=1, blocks=n) for n in (1, 4, 14) if n != tile.blocks]
            tiles += [t for t in swept if side.nbytes(t, block, columns) <= side.limit]
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
