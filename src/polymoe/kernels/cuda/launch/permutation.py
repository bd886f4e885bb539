"""The permutation sorts expanded rows (one per token and chosen expert) by expert and cuts them into work tiles."""

from __future__ import annotations

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import PermutationArgs
from polymoe.kernels.cuda.targets import Target

__all__ = ["FEW_ROWS", "LISTS", "LIST_BYTES", "Permutation", "permutation_bytes"]

LISTS, LIST_BYTES = 4, 16
"""``TileList``s: of gate and up, and of down, for ``work_tiles`` and for ``narrow_tiles``; and the bytes of one."""

FEW_ROWS = 32
"""Largest number of expanded rows that a single warp sorts."""

_MANY_ROWS, _ROWS_PER_CTA, _MOST_CTAS = 2048, 1024, 32
"""Several CTAs sort more expanded rows than the first number. Each has at least as many as the second; the third is the
largest number of CTAs."""


def _ctas(rows: int) -> int:
    """Return the number of CTAs that count the rows of each expert; 0 if one CTA does everything."""
    return min(_MOST_CTAS, rows // _ROWS_PER_CTA) if rows > _MANY_ROWS else 0


def _words(rows: int, experts: int, block_m: int, with_inverse: bool) -> dict[str, int]:
    """Return the number of 32-bit words of each array, by its name in the kernels' arguments."""
    active = min(experts, rows)
    inverse = {"expanded_to_permuted": 4 * rows} if with_inverse else {}
    counts = {"counts": ctas * experts} if (ctas := _ctas(rows)) else {}
    return {
        "work_tiles": 4 * (active + rows // block_m),
        "narrow_tiles": 4 * active,
        **inverse,
        "lists": 4 * LISTS,
        "permuted_to_expanded": rows,
        **counts,
    }


def permutation_bytes(rows: int, experts: int, block_m: int, with_inverse: bool) -> int:
    """Return the bytes of a permutation of ``rows`` expanded rows."""
    return 4 * sum(_words(rows, experts, block_m, with_inverse).values())


class Permutation:
    """Launches that compute the permutation of a call, and the offsets of its arrays in the workspace.

    Arrays are int32: ``work_tiles`` and ``narrow_tiles`` (expert, first permuted row, rows, first padded row),
    ``lists`` (for each launch of a GEMM its number of work tiles, CTAs that take part, and the next tile to take) and
    ``permuted_to_expanded``. With ``with_inverse``, there is also ``expanded_to_permuted``. It has four numbers for
    each expanded row: its permuted row (or -1), the first padded row of its work tile, its row in the tile, and the
    tile's padded rows.

    Args:
        first_expert, experts: the first id and the number of experts on this rank.
        block_m: most rows of a work tile.
        with_inverse: whether ``expanded_to_permuted`` is needed.
        narrow_m: an expert's last work tile is in ``narrow_tiles`` if it has at most so many rows; 0 for never.
        ctas: of a GEMM's launch.
        even: whether an expert's work tiles have about as many rows each; ``block_m`` is a multiple of 32 then.
        target: the set of cubins.
    """

    def __init__(
        self,
        first_expert: int,
        experts: int,
        block_m: int,
        with_inverse: bool,
        *,
        narrow_m: int = 0,
        ctas: int = 1,
        even: bool = False,
        target: Target,
    ) -> None:
        self.args = PermutationArgs(
            first_expert=first_expert, experts=experts, block_m=block_m, narrow_m=narrow_m, ctas=ctas, even=even
        )
        self.with_inverse, self.target = with_inverse, target
        self.launches: tuple[Launch, ...] = ()
        self.offsets: dict[str, int] = {}

    def resize(self, rows: int) -> int:
        """Prepare for ``rows`` expanded rows, and return the bytes of the arrays."""
        args = self.args
        words = _words(rows, args.experts, args.block_m, self.with_inverse)
        self.offsets, end = {}, 0
        for name, count in words.items():
            self.offsets[name] = 4 * end
            end += count
        args.rows = rows
        if ctas := _ctas(rows):
            self.launches = (
                self._launch("permutation_count", 1024, ctas),
                self._launch("permutation_many_ctas", 1024, ctas),
            )
        else:
            args.counts = None
            few = rows <= FEW_ROWS
            self.launches = (
                self._launch("permutation_one_warp" if few else "permutation_one_cta", 32 if few else 1024, 1),
            )
        return 4 * end

    def _launch(self, name: str, threads: int, ctas: int) -> Launch:
        launch = modules.kernel("permute", name, self.target).prepare(self.args, threads)
        launch.set_grid(ctas)
        return launch
