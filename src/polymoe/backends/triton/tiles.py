"""Which configurations of the Triton backend run: the heuristic, and what tuning tries. Loads no kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import log2

from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.packages import at_least
from polymoe.backends.triton.config import MAX_SPLIT_K, Tile, TritonConfig
from polymoe.common.shapes import ceil_div
from polymoe.formats import Encoding, PerGroup
from polymoe.machine import Machine
from polymoe.problem import Problem

PLANES = {"e2m1": 4, "int4": 4, "e4m3": 2, "bf16": 1, "fp16": 1}
"""Columns in one word of codes."""


# Pairs of a bound and block_m. The first bound that is at least the mean number of rows of an active expert decides.
_BLOCK_M = ((6.5, 8), (13, 16), (26, 32), (52, 64))
_MAX_BLOCK_M = 128
_MAX_BLOCK_M_IN_REGISTERS = 64
"""Wider tiles spill on GPUs whose MMA reads both operands from registers (SM80, SM89, SM120), and where scales by block
or group need a second accumulator. Where both hold, tiles spill beyond half of this."""
_MAX_BLOCK_N_IN_REGISTERS = 64
"""block_n with four warps, in either case. Found by compiling, see test_triton_compiles.py."""

# Tiles of gate and up, and of down, by bits of an element and block_m: the fastest on one H200. With a block_m of 8 or
# with two warps the MMA is mma.sync, which needs no synchronization of a warpgroup.
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
_BLOCK_SCALED_TILE = Tile(128, 128, 8, 2)
"""Up to a block_m of 64 it compiles without spills, for gate and up to 64 MMAs in 480 instructions. Never timed."""
_BLOCK_SCALED_TRITON = {120: "3.7.1", 121: "3.8"}
"""The first Triton that makes block-scaled MMAs of E4M3 for a GPU."""
# tail_block_m by block_m.
_TAIL_BLOCK_M = {8: 0, 16: 0, 32: 16, 64: 32, 128: 32}
_SHORT_K_STEPS = 4
"""Steps of K up to which a CTA of the down projection takes several blocks of weight rows, for quantized weights."""


def decodes_in_float32(problem: Problem) -> bool:
    """Whether the weights' scales are outside the range of the fast decoding in bfloat16."""
    return problem.scales is not None and problem.scales.outside_bfloat16


def scales_in_loop(encoding: Encoding) -> bool:
    """Whether codes are multiplied by their scales before the MMA: 4-bit codes, and E4M3 by powers of two of its rows,
    which is exact in bfloat16. Other scales by group multiply the result of a step."""
    g = encoding.granularity
    return isinstance(g, PerGroup) and (encoding.bits == 4 or (g.n == 1 and encoding.scale_dtype == "e8m0"))


def in_two_operands(encoding: Encoding) -> bool:
    """Whether a 16-bit operand does not hold a weight. Where activations are rounded to E4M3, each weight is the sum of
    two, which takes twice the MMAs: rounded weights would make h round to another E4M3 number too often."""
    return encoding.element == "int4"


def block_scaled(problem: Problem, machine: Machine) -> bool:
    """Whether MMAs can take E8M0 scales: power-of-two scales of activations, and weights that E4M3 and E8M0 scales for
    32 columns hold, on SM120."""
    least = _BLOCK_SCALED_TRITON.get(machine.device.sm)
    return (
        least is not None
        and at_least(machine.packages.get("triton", ""), least)
        and problem.activations.scale_dtype == "e8m0"
        and all(
            e.element in ("e2m1", "e4m3") and e.scale_dtype == "e8m0" and e.granularity == PerGroup(1, 32)
            for e in problem.spec.encodings.values()
        )
    )


def heuristic(problem: Problem, machine: Machine, tokens: int) -> TritonConfig:
    """Return tiles for the mean number of rows of an active expert, reduced until they fit into shared memory.

    With fewer than 32 rows in a work tile MMAs are not what limits, and have 16-bit operands.
    """
    mean = cost(problem, machine.device, tokens).mean_rows
    block_m = next((t for bound, t in _BLOCK_M if mean <= bound), _MAX_BLOCK_M)
    if block_m >= 32 and block_scaled(problem, machine):
        tile = _BLOCK_SCALED_TILE
        return TritonConfig(min(block_m, 64), tile, tile, pdl=True, block_scaled=True)
    return _with_block_m(problem, machine, tokens, min(block_m, _max_block_m(problem, machine)))


def _max_block_m(problem: Problem, machine: Machine) -> int:
    """Return the largest block_m that does not spill."""
    gemms = _gemms(problem, machine)
    by_step, bits = any(gemm.by_step for gemm in gemms), [gemm.bits for gemm in gemms]
    if not _mma_reads_shared_memory(machine):
        return _MAX_BLOCK_M_IN_REGISTERS // 2 if by_step else _MAX_BLOCK_M_IN_REGISTERS
    # On SM100 Triton puts decoded 4-bit weights into tensor memory, beside the accumulators: 544 of 512 columns, and
    # with two operands for each weight 528 even of tiles half as wide.
    if machine.device.sm // 10 == 10 and any(gemm.operands == 2 for gemm in gemms):
        return _MAX_BLOCK_M_IN_REGISTERS // 2
    full = by_step or 8 in bits or (4 in bits and machine.device.sm >= 100)
    return _MAX_BLOCK_M_IN_REGISTERS if full else _MAX_BLOCK_M


def _may_take_several_n_blocks(gemm: _Gemm, machine: Machine) -> bool:
    """Whether a CTA may take several blocks of weight rows.

    Not on SM100 with 4-bit weights: decoded weights of all steps would be in tensor memory at once, 528 of 512 columns.
    Nor with two operands for each weight, which spill.
    """
    return gemm.operands == 1 and (gemm.bits != 4 or machine.device.sm // 10 != 10)


def _mma_reads_shared_memory(machine: Machine) -> bool:
    """Whether the MMA reads an operand from shared memory (wgmma, tcgen05) rather than both from registers."""
    return machine.device.sm // 10 in (9, 10)


def _with_block_m(problem: Problem, machine: Machine, tokens: int, block_m: int) -> TritonConfig:
    """Return the heuristic's tiles for a given ``block_m``, and 16-bit operands."""
    gemm_up, gemm_down = _gemms(problem, machine)
    up = gemm_up.fit(_TILES[gemm_up.bits][block_m][0], block_m)
    down = gemm_down.fit(_TILES[gemm_down.bits][block_m][1], block_m)
    if gemm_down.by_step or (gemm_down.bits == 4 and not _mma_reads_shared_memory(machine)):
        down = replace(down, block_n=min(down.block_n, _MAX_BLOCK_N_IN_REGISTERS))
    if decodes_in_float32(problem):  # four times the registers
        up, down = (replace(t, block_k=min(t.block_k, 64)) for t in (up, down))
    elif gemm_up.operands == 2:  # twice the registers
        up, down = (replace(t, block_k=t.block_k // 2) for t in (up, down))
    mxfp8 = gemm_up.bits == 8 and scales_in_loop(gemm_up.encoding)
    if mxfp8 and block_m == 64 and (gemm_up.by_step or not _mma_reads_shared_memory(machine)):
        up = replace(up, block_k=min(up.block_k, 64))  # with 128, decoded MXFP8 weights spill
    if gemm_up.by_step and block_m == 64 and machine.device.sm >= 100:
        # The accumulators of tcgen05 lie in tensor memory, but each step's must be loaded into registers to be scaled.
        up = replace(up, num_warps=8)
    c = cost(problem, machine.device, tokens)
    tiles, sms = c.uniform_experts * max(1.0, c.mean_rows / block_m), machine.device.sms
    n, k = problem.spec.matrix_shape("up")
    if block_m == 8:
        # Few CTAs: split K. Where activations are quantized, the launch that adds up the parts exists anyway.
        wanted = (6 if problem.activations.quantized else 2) * sms
        steps = min(k // (8 * up.block_k), MAX_SPLIT_K // 2)
        while tiles * ceil_div(n, up.block_n) * up.split_k < wanted and up.split_k <= steps:
            up = replace(up, split_k=2 * up.split_k)
    n, k = problem.spec.matrix_shape("down")
    short_k = gemm_down.bits < 16 and k <= _SHORT_K_STEPS * down.block_k
    if short_k and _may_take_several_n_blocks(gemm_down, machine):
        most = tiles * ceil_div(n, down.block_n) / (16 * sms)
        several = replace(down, n_blocks_per_cta=next((b for b in (14, 8, 4, 2) if b <= most), 1))
        down = several if gemm_down.nbytes(several, block_m, k) <= gemm_down.limit else down
    tail_block_m = 64 if block_m == 128 and 0.1 < c.mean_rows % 128 / 128 <= 0.55 else _TAIL_BLOCK_M[block_m]
    return TritonConfig(block_m, up, down, tail_block_m, pdl=machine.device.sm >= 90)


@dataclass(frozen=True, slots=True)
class _Gemm:
    """What limits the tiles of one GEMM: its encoding, its matrices (gate and up are two), the GPU's shared memory."""

    encoding: Encoding
    matrices: int
    limit: int
    by_step: bool
    """Whether each step is scaled before it is accumulated, which takes a second accumulator."""
    operands: int = 1
    """Operands that a decoded weight takes, see :func:`in_two_operands`."""

    @property
    def bits(self) -> int:
        return self.encoding.bits

    def nbytes(self, t: Tile, block_m: int, k: int = 0) -> int:
        """Return the shared memory of a tile. With several N blocks per CTA it holds all ``k`` columns of x."""
        if t.n_blocks_per_cta > 1:
            weights = t.block_n * k * self.bits // 8
            return t.num_stages * weights + k * block_m * 2 + t.block_n * block_m * 4
        weights = self.matrices * t.block_n * t.block_k * self.bits // 8
        # The epilogue stages the result in the same memory.
        return max(t.num_stages * (weights + t.block_k * block_m * 2), t.block_n * block_m * 4)

    def fit(self, tile: Tile, block_m: int) -> Tile:
        """Return the tile with fewer stages, then a smaller block_k, until its pipeline fits."""
        minimum = _min_block_k(self.encoding)
        while self.nbytes(tile, block_m) > self.limit and (tile.num_stages > 2 or tile.block_k > minimum):
            change = {"num_stages": tile.num_stages - 1} if tile.num_stages > 2 else {"block_k": tile.block_k // 2}
            tile = replace(tile, **change)
        return tile

    def tiles(self, block_m: int) -> Iterator[Tile]:
        """Yield the tiles to try: those that fit, and whose accumulators and decoded weights fit into registers."""
        for block_n in (32, 64, 128):
            for block_k in (64, 128, 256):
                for num_warps in (2, 4, 8):
                    threads = 32 * num_warps
                    registers = self.matrices * block_n * block_m / threads
                    registers += self.operands * block_n * block_k / 2 / threads
                    # At most one scale for each step.
                    scaled = 1 if scales_in_loop(self.encoding) else self.encoding.group_columns
                    if registers > 160 or block_k < _min_block_k(self.encoding) or 1 < scaled < block_k:
                        continue
                    for num_stages in (2, 3, 4, 5):
                        tile = Tile(block_n, block_k, num_warps, num_stages)
                        if self.nbytes(tile, block_m) <= self.limit:
                            yield tile


def _min_block_k(encoding: Encoding) -> int:
    """Return the least block_k: each plane of a step holds at least the 16 columns of one MMA."""
    return 16 * PLANES[encoding.element]


def smaller(config: TritonConfig, projection: str, encoding: Encoding) -> TritonConfig | None:
    """Return the next configuration whose GEMM ``projection`` ("up" or "down") takes less shared memory.

    For tiles that fit by the estimate of :meth:`_Gemm.fit` and that a GPU then refused. None after the smallest.
    """
    tile: Tile = getattr(config, projection)
    if tile.num_stages > 2:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    elif tile.n_blocks_per_cta > 1:
        tile = replace(tile, n_blocks_per_cta=1)
    elif tile.block_k > _min_block_k(encoding):
        tile = replace(tile, block_k=tile.block_k // 2)
    elif config.block_m > 16:
        return replace(config, block_m=config.block_m // 2, tail_block_m=0)
    elif tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2, num_warps=max(1, tile.num_warps // 2))
    else:
        return None
    return replace(config, **{projection: tile})


def _gemms(problem: Problem, machine: Machine) -> tuple[_Gemm, _Gemm]:
    spec, limit = problem.spec, machine.device.shared_memory_bytes
    activations = problem.activations
    x_by_step = activations.group_columns is not None and activations.scale_dtype != "e8m0"
    by_step = [
        x_by_step or (isinstance(e.granularity, PerGroup) and not scales_in_loop(e)) for e in (spec.up, spec.down)
    ]
    operands = [2 if activations.quantized and in_two_operands(e) else 1 for e in (spec.up, spec.down)]
    return (
        _Gemm(spec.up, 2 if spec.gated else 1, limit, by_step[0], operands[0]),
        _Gemm(spec.down, 1, limit, by_step[1], operands[1]),
    )


_NEAR, _FEW = 10, 3
"""How many tiles of each GEMM are tried at the likeliest block_m, and at its neighbours."""


def tuning_configs(
    problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
) -> list[TritonConfig]:
    """Return what tuning tries, see :meth:`polymoe.backends.Backend.tuning_configs`.

    First the heuristic's choice, then other values of block_m, and around each of them one changed field at a time.
    The GEMMs run one after the other, so not every pair of tiles needs a try. The next call combines the best value
    of each field, and tries the neighbours of the best configuration so far.
    """
    own = heuristic(problem, machine, tokens)
    if own.block_scaled:
        stages = [replace(own, **{name: replace(_BLOCK_SCALED_TILE, num_stages=3)}) for name in ("up", "down")]
        plain = _with_block_m(problem, machine, tokens, own.block_m)
        return [] if timed else [own, replace(own, block_m=96 - own.block_m), *stages, plain]
    if not timed:
        most = _max_block_m(problem, machine)
        blocks = [b for b in (own.block_m, 2 * own.block_m, own.block_m // 2) if 8 <= b <= most]
        found = [_with_block_m(problem, machine, tokens, b) for b in blocks]
        for b, center in zip(blocks, list(found), strict=True):
            found += _around(problem, machine, center, _NEAR if b == own.block_m else _FEW)
    else:
        times = {config: time for config, time in timed if isinstance(config, TritonConfig)}
        ranked = sorted(times, key=times.__getitem__)
        blocks = dict.fromkeys(config.block_m for config in ranked)
        found = [_best_of_each(_with_block_m(problem, machine, tokens, b), ranked) for b in blocks]
        best = ranked[0]
        if best.block_m != own.block_m:  # so far only a few tiles with this block_m were tried
            found += _around(problem, machine, _with_block_m(problem, machine, tokens, best.block_m), _NEAR)
        found += _around(problem, machine, best, _FEW)
    return list(dict.fromkeys(found))


def _best_of_each(center: TritonConfig, ranked: Sequence[TritonConfig]) -> TritonConfig:
    """Return the center with each field as in the fastest config that differs from it in that field alone."""
    best = {}
    for field in fields(center):
        like_center = (c for c in ranked if replace(c, **{field.name: getattr(center, field.name)}) == center)
        best[field.name] = getattr(next(like_center, center), field.name)
    return replace(center, **{**best, "block_m": center.block_m})


def _around(problem: Problem, machine: Machine, center: TritonConfig, count: int) -> list[TritonConfig]:
    """Return configs that differ from the center in one field; each GEMM gets the ``count`` nearest other tiles."""
    found: list[TritonConfig] = []
    spec, block_m = problem.spec, center.block_m
    for name, gemm in zip(("up", "down"), _gemms(problem, machine), strict=True):
        tile: Tile = getattr(center, name)
        tiles = _nearest(tile, gemm.tiles(block_m), count)
        k = spec.matrix_shape(name)[1]
        # Split-K gives more CTAs where rows are few. Each part should have enough steps to fill the pipeline.
        if block_m <= 16 and k >= 8 * tile.split_k * tile.block_k and tile.split_k < MAX_SPLIT_K:
            tiles.append(replace(tile, split_k=2 * tile.split_k))
        if tile.split_k > 1:
            tiles.append(replace(tile, split_k=tile.split_k // 2))
        if name == "down" and _may_take_several_n_blocks(gemm, machine) and k <= _SHORT_K_STEPS * tile.block_k:
            counts = [n for n in (1, 4, 14) if n != tile.n_blocks_per_cta]
            several = [replace(tile, split_k=1, n_blocks_per_cta=n) for n in counts]
            tiles += [t for t in several if gemm.nbytes(t, block_m, k) <= gemm.limit]
        found += [replace(center, **{name: t}) for t in tiles]
    if machine.device.sm >= 90:
        found.append(replace(center, pdl=not center.pdl))
    tails = [t for t in (0, block_m // 4, block_m // 2) if t == 0 or t >= 8]
    found += [replace(center, tail_block_m=t) for t in tails if t != center.tail_block_m]
    return found


def _nearest(tile: Tile, tiles: Iterator[Tile], count: int) -> list[Tile]:
    def distance(t: Tile) -> float:
        sizes = ((tile.block_n, t.block_n), (tile.block_k, t.block_k), (tile.num_warps, t.num_warps))
        # A larger block_n with more warps is a smaller change than either alone.
        per_warp = abs(log2(tile.block_n / t.block_n) - log2(tile.num_warps / t.num_warps)) / 2
        return sum(abs(log2(a / b)) for a, b in sizes) + abs(tile.num_stages - t.num_stages) * 0.75 + per_warp

    return sorted((t for t in tiles if t != tile), key=distance)[:count]
