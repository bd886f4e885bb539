"""What a call's launches follow from: the layer, the configuration, and the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from polymoe.kernels.cuda.launch.args import NUMBERED_DTYPES
from polymoe.kernels.cuda.launch.layer import Layer, Matrix
from polymoe.kernels.cuda.launch.steps import FINALIZE, PERMUTATION, GemmInput, Step, gemm_steps
from polymoe.kernels.cuda.pipelines import E4M3_BLOCK_K, E4M3_ROW_BYTES, e4m3_row_bytes, round_up
from polymoe.kernels.cuda.spec import TILE_ROWS, KernelFamily

FEW_ROWS = 32
"""Largest number of expanded rows that a single warp sorts."""

LIST_BYTES = 16
"""Bytes of a ``TileList``; each launch of a GEMM has one."""

_LISTS = ("gate_up_list", "down_list", "narrow_gate_up_list", "narrow_down_list")
_ALIGNMENT = 256  # of the workspace's regions; more than any copy needs
_COLUMNS_PER_THREAD, _THREADS, _MOST_THREADS = 16, 256, 512  # of kernels that round rows
FINALIZE_COLUMNS = 1024  # per CTA
_FINALIZE_CTAS = 8  # that run on an SM at a time
_FINALIZE_MANY_TOP_K = 2
"""Most experts of a token for which several tokens a CTA are faster: with more, a CTA has loads enough in flight."""

_MANY_ROWS, _ROWS_PER_CTA, _MOST_CTAS = 2048, 1024, 32
"""Several CTAs sort more expanded rows than the first number. Each has at least as many as the second; the third is the
largest number of CTAs."""

BUFFERS: Mapping[str, Callable[[int, int, int], int]] = {
    "": lambda rows, padded, columns: 0,
    "bf16_rows": lambda rows, padded, columns: rows * columns * 2,
    "float32_rows": lambda rows, padded, columns: rows * columns * 4,
    "bf16_tiles": lambda rows, padded, columns: padded * round_up(columns, 64) * 2,
    "e4m3_rows": lambda rows, padded, columns: rows * e4m3_row_bytes(columns),
    "e4m3_tiles": lambda rows, padded, columns: padded * -(-columns // E4M3_BLOCK_K) * E4M3_ROW_BYTES,
}
"""Bytes of rows in the workspace: of ``rows`` rows, or in tiles of ``padded`` rows, which have 64 columns of bfloat16,
or 128 of E4M3 and their scale. E4M3 rows have scales at their end."""


def sorting_ctas(rows: int) -> int:
    """Return the number of CTAs that count the rows of each expert; 0 if one CTA does everything."""
    return min(_MOST_CTAS, rows // _ROWS_PER_CTA) if rows > _MANY_ROWS else 0


def tokens_per_cta(tokens: int, top_k: int, columns: int, sms: int) -> int:
    """Return how many tokens a CTA of the weighted sum has.

    One where a token has several experts, or where all CTAs run at a time; else as many tokens as fill the GPU once,
    with at most 32 expanded rows: those of finalize_many_bf16.
    """
    if top_k > _FINALIZE_MANY_TOP_K:
        return 1
    ctas = tokens * -(-columns // FINALIZE_COLUMNS)
    return max(1, min(-(-ctas // (sms * _FINALIZE_CTAS)), 32 // top_k))


def permutation_words(rows: int, experts: int, block_m: int, inverse: bool) -> dict[str, int]:
    """Return the number of 32-bit words of each array of the permutation, by its name in the kernels' arguments.

    ``work_tiles`` and ``narrow_tiles`` have expert, first permuted row, rows and first padded row of each tile, and
    ``lists`` for each launch of a GEMM its number of work tiles, CTAs that take part, and the next tile to take.
    ``expanded_to_permuted``, the inverse, has four numbers for each expanded row: its permuted row (or -1), the first
    padded row of its work tile, its row in the tile, and the tile's padded rows.
    """
    active = min(experts, rows)
    return {
        "work_tiles": 4 * (active + rows // block_m),
        "narrow_tiles": 4 * active,
        **({"expanded_to_permuted": 4 * rows} if inverse else {}),
        "lists": LIST_BYTES // 4 * len(_LISTS),
        "permuted_to_expanded": rows,
        **({"counts": ctas * experts} if (ctas := sorting_ctas(rows)) else {}),
    }


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which of a family's tiles run, as in a configuration.

    Attributes:
        block_m: most rows of x in a work tile.
        down_block_m: ``block_m`` of the kernel for the down projection, which may be larger; 0 if it is the same. Work
            tiles are the same.
        narrow_m: ``block_m`` of further launches, one for each GEMM, for the work tiles of at most so many rows; 0 if
            there are none.
    """

    block_m: int
    down_block_m: int = 0
    narrow_m: int = 0


class CallShape(NamedTuple):
    """What the numbers in :mod:`.steps` follow from.

    Attributes:
        layer, family, tiles: what is called.
        tokens, top_k: tokens, and experts of each.
    """

    layer: Layer
    family: KernelFamily
    tiles: Tiles
    tokens: int
    top_k: int

    @property
    def rows(self) -> int:
        """Expanded rows."""
        return self.tokens * self.top_k

    @property
    def gemms_sort(self) -> bool:
        """Whether GEMMs sort rows by themselves."""
        return self.family.sorts_few_rows and self.rows <= FEW_ROWS

    @property
    def planned_input(self) -> GemmInput:
        """What the first GEMM reads where x is not quantized."""
        few = self.family.gathers.get(self.tiles.block_m, 0)
        holds = {
            "true": True,
            "static_scales": self.layer.up.input_scale is not None,
            "one_expert_a_token": self.top_k == 1,
            "few_rows_of_weights": self.layer.up.n <= few,
        }
        return next(rows for rows in self.family.x if holds[rows.when])

    def workspace(self) -> tuple[dict[str, int], int]:
        """Return the offset of each array in the workspace, and the bytes of all together."""
        layer, family, rows, x = self.layer, self.family, self.rows, self.planned_input
        offsets, end = {}, 0
        words = permutation_words(rows, layer.experts, self.tiles.block_m, family.y == "bf16_rows")
        for name, count in words.items():
            offsets[name] = 4 * end
            end += count
        for i, name in enumerate(_LISTS):
            offsets[name] = offsets["lists"] + i * LIST_BYTES
        padded = rows + (TILE_ROWS - 1) * min(layer.experts, rows)
        end = round_up(4 * end, _ALIGNMENT)
        for name, buffer, count, columns in (
            ("x_rows", x.buffer, self.tokens if x.by_token else rows, layer.up.k),
            ("h", family.h, rows, layer.down.k),
            ("rounded_h", family.rounded_h.buffer, rows, layer.down.k),
            ("y", family.y, rows, layer.down.n),
        ):
            offsets[name] = end
            end += round_up(BUFFERS[buffer](count, padded, columns), _ALIGNMENT)
        return offsets, end

    def numbers(self) -> dict[str, int]:
        """Return the numbers that follow from the tokens."""
        layer, tokens, rows, sorts = self.layer, self.tokens, self.rows, not self.gemms_sort
        ctas, x_rows = sorting_ctas(rows), tokens if layer.up.input_scale is None else rows
        each = tokens_per_cta(tokens, self.top_k, layer.down.n, layer.sms) if self.family.y == "bf16_rows" else 1
        return {
            "true": True,
            "tokens": tokens,
            "top_k": self.top_k,
            "rows": rows,
            "one_warp_sorts": sorts and rows <= FEW_ROWS,
            "one_cta_sorts": rows > FEW_ROWS and not ctas,
            "many_ctas_sort": ctas > 0,
            "sorting_ctas": ctas,
            "x_quantized_rows": x_rows,
            "x_quantizing_ctas": -(-x_rows // _rows_per_cta(layer.up)),
            "h_quantizing_ctas": -(-rows // _rows_per_cta(layer.down)),
            "tokens_per_cta": each,
            "one_token_a_cta": each == 1,
            "many_tokens_a_cta": each > 1,
            "finalizing_ctas": -(-tokens // each),
        }


def layer_numbers(layer: Layer, family: KernelFamily, tiles: Tiles) -> dict[str, Any]:
    """Return the numbers, and addresses or None, that do not depend on the call."""
    up, down = layer.up, layer.down
    return {
        "true": True,
        "experts": layer.experts,
        "sms": layer.sms,
        "block_m": tiles.block_m,
        "narrow_m": tiles.narrow_m,
        "even_tiles": family.even_tiles,
        "hidden": up.k,
        "intermediate": down.k,
        "float32": NUMBERED_DTYPES.index("float32"),
        "x_scales": None if up.input_scale is None else up.input_scale.data_ptr(),
        "h_scales": None if down.input_scale is None else down.input_scale.data_ptr(),
        "hidden_ctas": -(-up.k // (_COLUMNS_PER_THREAD * _THREADS)),
        "intermediate_ctas": -(-down.k // (_COLUMNS_PER_THREAD * _THREADS)),
        "x_row_ctas": -(-up.k // (_COLUMNS_PER_THREAD * _row_threads(up))),
        "x_row_threads": _row_threads(up),
        "h_row_threads": _row_threads(down),
        "x_quantizing_threads": _row_threads(up) * _rows_per_cta(up),
        "h_quantizing_threads": _row_threads(down) * _rows_per_cta(down),
        "finalizing_column_ctas": -(-down.n // FINALIZE_COLUMNS),
    }


def steps_of(family: KernelFamily, x: GemmInput) -> tuple[Step, ...]:
    """Return the launches of a family's calls in which the first GEMM reads ``x``, in order."""
    found = (
        *PERMUTATION,
        x.step,
        *gemm_steps(family.args, x),
        family.rounded_h.step,
        *gemm_steps(family.args, family.rounded_h),
        *FINALIZE[family.y],
    )
    return tuple(step for step in found if step is not None)


def _row_threads(matrix: Matrix) -> int:
    """Return the threads that round a row of so many columns."""
    return min(_MOST_THREADS, round_up(matrix.k // _COLUMNS_PER_THREAD, 32))


def _rows_per_cta(matrix: Matrix) -> int:
    return max(1, _THREADS // _row_threads(matrix))
