"""TritonConfig: tiles of the Triton backend, and the ranges of their sizes.

A and B are swapped: the weights are the left operand. A tile is ``block_n`` rows of one expert's weights by ``block_m``
of the permuted rows of that expert, computed in steps of ``block_k``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from polymoe.backends.config import Config
from polymoe.errors import PlanError

MAX_SPLIT_K = 64
"""Most parts of K."""

_POWERS = {
    "block_m": (8, 256), "tail_block_m": (8, 128), "block_n": (16, 256), "block_k": (16, 512), "num_warps": (1, 16),
    "split_k": (1, MAX_SPLIT_K),
}  # fmt: skip
_NUMBERS = {"num_stages": (1, 8), "maxnreg": (16, 255), "n_blocks_per_cta": (1, 64)}
"""Least and largest value of each field: powers of two, and other numbers. A table of measured times is a file, which
may have any numbers; none outside of these ranges reaches the compiler or a launch."""
_MAX_VALUES_PER_THREAD = 256
"""Accumulators of a tile, or a quarter of the weights that one step decodes: more spill, and compile for minutes."""


def _check(config: Tile | TritonConfig) -> None:
    for field in fields(config):
        value, power = getattr(config, field.name), field.name in _POWERS
        least, largest = (_POWERS if power else _NUMBERS).get(field.name, (None, None))
        if value is None or least is None or largest is None or (field.name == "tail_block_m" and value == 0):
            continue
        if not least <= value <= largest or (power and value & (value - 1)):
            expected = f"a {'power of two' if power else 'number'} from {least} to {largest}"
            raise PlanError(f"{type(config).__name__}.{field.name}", expected=expected, got=str(value))


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one GEMM.

    Attributes:
        block_n: rows of weights, the M of the MMA.
        block_k: columns of weights that one step of the mainloop reads.
        num_warps: warps of a CTA.
        num_stages: stages of the load pipeline.
        split_k: parts of K, each computed by its own CTA.
        maxnreg: limit of registers per thread; None leaves it to the compiler.
        n_blocks_per_cta: blocks of weight rows that one CTA computes in turn. Only the down projection uses it, where K
            is at most four steps.
    """

    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 3
    split_k: int = 1
    maxnreg: int | None = None
    n_blocks_per_cta: int = 1

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        split = f" / {self.split_k}" if self.split_k > 1 else ""
        blocks = f", {self.n_blocks_per_cta} N blocks per CTA" if self.n_blocks_per_cta > 1 else ""
        cap = f", maxnreg={self.maxnreg}" if self.maxnreg else ""
        return f"{self.block_n}x{self.block_k}{split}, {self.num_warps} warps, {self.num_stages} stages{cap}{blocks}"


@dataclass(frozen=True, slots=True)
class TritonConfig(Config):
    """Tiles of both GEMMs.

    Attributes:
        block_m: permuted rows of a work tile.
        up: tile of the gate and up projections.
        down: tile of the down projection.
        tail_block_m: a work tile with at most this many rows is computed only this wide; 0 turns that off.
        pdl: whether kernels use programmatic dependent launch (SM90 and newer).
        block_scaled: whether MMAs take E4M3 codes and E8M0 scales of weights and x, not 16-bit operands (SM120,
            activations with power-of-two scales). Such tiles split no K, and are computed in full.
    """

    block_m: int = 16
    up: Tile = Tile()
    down: Tile = Tile()
    tail_block_m: int = 0
    pdl: bool = False
    block_scaled: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_dict(cls, data: object, where: str = "config") -> TritonConfig:
        """Return the configuration that :meth:`to_dict` wrote, see :meth:`Config.from_dict`.

        Raises:
            PlanError: for a field out of range, or fields that do not fit each other.
        """
        config = super(TritonConfig, cls).from_dict(data, where)
        if config.tail_block_m >= config.block_m:
            expected = f"less than block_m, {config.block_m}"
            raise PlanError(f"{where}.tail_block_m", expected=expected, got=str(config.tail_block_m))
        for name, tile in (("up", config.up), ("down", config.down)):
            values = tile.block_n * max(config.block_m, tile.block_k // 4) // (32 * tile.num_warps)
            if values > _MAX_VALUES_PER_THREAD:
                expected = f"at most {_MAX_VALUES_PER_THREAD} accumulators for each thread"
                raise PlanError(f"{where}.{name}", expected=expected, got=f"{values}: {config}")
            if config.block_scaled and (tile.split_k > 1 or tile.n_blocks_per_cta > 1 or tile.block_k < 32):
                expected = "no split K, one N block per CTA and a block_k of at least 32"
                raise PlanError(f"{where}.{name}", expected=expected, got=str(config))
        return config

    @property
    def kernel_family(self) -> str:
        """The kernel of the down projection, which has one of its own for a short K."""
        if self.block_scaled:
            return "grouped_gemm_block_scaled"
        return "grouped_gemm_short_k" if self.down.n_blocks_per_cta > 1 and self.down.split_k == 1 else "grouped_gemm"

    def __str__(self) -> str:
        rest = (f", tail_block_m={self.tail_block_m}" if self.tail_block_m else "") + (", pdl" if self.pdl else "")
        rest += ", block-scaled" if self.block_scaled else ""
        return f"block_m={self.block_m}, up={self.up}, down={self.down}{rest}"
