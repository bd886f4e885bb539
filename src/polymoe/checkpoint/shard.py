"""Which part of a layer's experts one rank holds: tensor parallel over F, expert parallel over E.

Slices of F never split a group of weights that share a scale. Only FP8 blocks may be split: their scales are first
repeated onto a finer grid, which changes no number. Everything but the slicing itself needs only a config.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from polymoe.common.shapes import ceil_div
from polymoe.errors import ArgumentError, quoted
from polymoe.formats import Encoding, PerGroup, QuantTensor
from polymoe.problem.tensors import Expert, ExpertsSpec

Parallel = int | tuple[int, int]
"""A parallel group: ``(rank, size)``, or only the size for rank 0."""

FINEST_BLOCK = 32
"""Smallest FP8 block that scales are repeated onto, since kernels process at least 32 columns at a time."""

MOST_RANKS = 4_096
"""Largest size of a parallel group, of which a list of slices is made."""

_SIZES_TRIED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank: ``tp_rank`` of the ``tp`` that split every expert, ``ep_rank`` of the ``ep`` that share out the
    experts."""

    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (("tp", self.tp_rank, self.tp), ("ep", self.ep_rank, self.ep)):
            if not 1 <= size <= MOST_RANKS:
                raise ArgumentError(name, expected=f"1 to {MOST_RANKS} ranks", got=quoted(size))
            if not 0 <= rank < size:
                raise ArgumentError(f"{name} rank", expected=f"0 to {size - 1}", got=quoted(rank))

    @classmethod
    def of(cls, tp: Parallel = 1, ep: Parallel = 1) -> Shard:
        """Create from ``(rank, size)`` or from a size, which means rank 0.

        Raises:
            ArgumentError: for anything else, and for ranks out of range.
        """
        (tp_rank, tp_size), (ep_rank, ep_size) = _rank_and_size("tp", tp), _rank_and_size("ep", ep)
        return cls(tp_rank=tp_rank, tp=tp_size, ep_rank=ep_rank, ep=ep_size)


def split_experts(experts: int, shard: Shard) -> tuple[int, int]:
    """Return ``(first, count)`` of this rank's experts; the first ``experts % ep`` ranks hold one more than the others.

    Raises:
        ArgumentError: if a rank would hold none.
    """
    if shard.ep > experts:
        expected = f"at most {experts} ranks, one for each expert"
        raise ArgumentError(f"ep={shard.ep}", expected=expected, got=str(shard.ep))
    each, more = divmod(experts, shard.ep)
    return shard.ep_rank * each + min(shard.ep_rank, more), each + (shard.ep_rank < more)


def widths(intermediate: int, encodings: dict[str, Encoding], tp: int, *, uneven: bool = False) -> tuple[int, ...]:
    """Return F of each rank if ``tp`` ranks split ``intermediate``. ``encodings`` are those of gate (if any), up and
    down.

    The slices are equal if that fits the groups. Otherwise, with ``uneven``, all ranks get the same number of whole
    groups of at least 32 and the last rank gets the rest: 2880 over 8 ranks is seven times 384 and 192.

    Raises:
        ArgumentError: if a group would be split or a rank would be empty; the hint lists the sizes that work.
    """
    found = _widths(intermediate, encodings, tp, uneven)
    if not isinstance(found, str):
        return found
    sizes = range(1, _SIZES_TRIED + 1)
    working = ", ".join(str(n) for n in sizes if not isinstance(_widths(intermediate, encodings, n, uneven), str))
    hint = f"tensor parallel sizes that work, up to {_SIZES_TRIED}: {working}"
    raise ArgumentError(f"tp={tp}", expected="slices of whole groups", got=found, hint=hint)


def shard_spec(spec: ExpertsSpec, shard: Shard, *, uneven: bool = False) -> ExpertsSpec:
    """Return one rank's part of a whole layer ``spec``: F, encodings (finer FP8 blocks where needed) and experts.

    Raises:
        ArgumentError: see :func:`widths` and :func:`split_experts`.
    """
    each = widths(spec.intermediate, spec.encodings, shard.tp, uneven=uneven)
    first, count = split_experts(spec.experts, shard)
    cut = {n: align_encoding(e, _axis(n), _block(e, _axis(n), each)) for n, e in spec.encodings.items()}
    return replace(
        spec,
        intermediate=each[shard.tp_rank],
        gate=cut.get("gate"),
        up=cut["up"],
        down=cut["down"],
        first_expert=first,
        local_experts=count,
    )


def shard_expert(expert: Expert, shard: Shard, *, uneven: bool = False) -> Expert:
    """Return this rank's slice of a whole expert, as views unless a scale grid is refined.

    It consists of rows of gate and up with their biases, and columns of down. Only the first rank has down's bias, the
    others have zeros, so that the sum of all ranks contains it once.
    """
    if shard.tp == 1:
        return expert
    intermediate = expert.up.shape[0]
    encodings = {name: p.encoding for name, p in expert.projections.items()}
    each = widths(intermediate, encodings, shard.tp, uneven=uneven)
    start = sum(each[: shard.tp_rank])
    stop = start + each[shard.tp_rank]

    def rows(matrix: QuantTensor) -> QuantTensor:
        return align(matrix, -2, _block(matrix.encoding, -2, each)).rows(start, stop)

    down = align(expert.down, -1, _block(expert.down.encoding, -1, each))
    bias = expert.down_bias
    return replace(
        expert,
        gate=None if expert.gate is None else rows(expert.gate),
        up=rows(expert.up),
        down=down.columns(start, stop),
        gate_bias=None if expert.gate_bias is None else expert.gate_bias[start:stop],
        up_bias=None if expert.up_bias is None else expert.up_bias[start:stop],
        down_bias=torch.zeros_like(bias) if bias is not None and shard.tp_rank else bias,
    )


def align_encoding(encoding: Encoding, axis: int, block: int) -> Encoding:
    """Return ``encoding`` with blocks of ``block`` rows (``axis`` -2) or columns (-1) instead of coarser ones."""
    g = encoding.granularity
    if not isinstance(g, PerGroup) or encoding.grain(axis) <= block:
        return encoding
    return replace(encoding, granularity=PerGroup(block, g.k) if axis == -2 else PerGroup(g.n, block))


def align(matrix: QuantTensor, axis: int, block: int) -> QuantTensor:
    """Return the same numbers in the encoding of :func:`align_encoding`, with repeated scales.

    Raises:
        FormatError: if the present blocks are not a multiple of the new ones.
    """
    encoding = align_encoding(matrix.encoding, axis, block)
    g = encoding.granularity
    return matrix.refine(g.n, g.k) if encoding != matrix.encoding and isinstance(g, PerGroup) else matrix


def _rank_and_size(name: str, group: Parallel) -> tuple[int, int]:
    if type(group) is int:
        return 0, group
    if isinstance(group, tuple) and len(group) == 2 and all(type(n) is int for n in group):
        return group
    raise ArgumentError(name, expected="a size, or (rank, size)", got=quoted(group))


def _axis(projection: str) -> int:
    """Return the axis of a projection that is F."""
    return -1 if projection == "down" else -2


def _widths(intermediate: int, encodings: dict[str, Encoding], tp: int, uneven: bool) -> tuple[int, ...] | str:
    """Return the slices, or the reason why there are none."""
    if tp == 1:
        return (intermediate,)
    if intermediate % tp:
        why = f"{intermediate} is not a multiple of {tp}"
    else:
        equal = (intermediate // tp,) * tp
        why = _misfit(encodings, equal)
        if why is None:
            return equal
    if not uneven:
        return why
    group = math.lcm(32, *(e.grain(_axis(name)) for name, e in encodings.items()))
    groups = ceil_div(intermediate, group)
    each = ceil_div(groups, tp) * group
    slices = tuple(min(each, intermediate - rank * each) for rank in range(tp))
    if slices[-1] <= 0:
        return f"{groups} groups of {group} for {tp} ranks, some of which would be empty"
    return slices


def _misfit(encodings: dict[str, Encoding], slices: tuple[int, ...]) -> str | None:
    """Return which slice splits which group, or None. The last slice ends with the matrix, so it splits nothing."""
    for name, e in encodings.items():
        grain = _block(e, _axis(name), slices)
        for width in slices[:-1]:
            if width % grain:
                why = f"{width} is not a multiple of {grain}"
                if e.element == "e4m3" and (fine := math.gcd(grain, *slices[:-1])) < grain:
                    why += f", and of {fine} only, where blocks of {FINEST_BLOCK} are the finest"
                return f"{why} ({e.name}, {name} projection)"
    return None


def _block(encoding: Encoding, axis: int, slices: tuple[int, ...]) -> int:
    """Return the grain along F after FP8 blocks are refined as far as the slices need and the limit allows."""
    grain = encoding.grain(axis)
    if encoding.element != "e4m3":
        return grain
    fine = math.gcd(grain, *slices[:-1])
    return fine if fine >= min(FINEST_BLOCK, grain) else grain
