"""Packing with checks: every expert holds numbers, and is in its place in the packed layer, byte for byte.

Both are measured on the device, while the experts are copied there one by one: a few passes over memory, and no waiting
for the device before the end. What looks wrong is then read again and compared exactly before it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from polymoe.errors import ArgumentError, CheckpointError, VerificationError, quoted
from polymoe.formats.extremes import extremes, has_numbers, is_finite, is_zero
from polymoe.layouts.base import Layout, Packed
from polymoe.layouts.checksums import Checksums
from polymoe.layouts.staging import INPUT_SCALES, PartOffsets, ordinary_tensors, staged
from polymoe.problem.tensors import Expert, ExpertWeights

_Numbers = Tensor | list[int] | list[float]

_BLOCK_BYTES = 64 << 20
"""Size of the experts that are unpacked at once. Temporary memory is less than three times as much."""


@ordinary_tensors()
def pack_checked(
    layout: Layout,
    weights: ExpertWeights,
    device: torch.device,
    where: str,
    *,
    out: Packed | None = None,
    compare: bool = True,
) -> Packed:
    """Pack a layer as ``layout.pack`` does, and check all of its experts.

    Args:
        layout: how to pack.
        weights: the experts. Their numbers are checked on ``device`` instead of when they are read.
        device: where the packed tensors are.
        where: the layer's name for messages.
        out: a packed layer whose tensors are overwritten in place.
        compare: whether to compare the packed experts with those that were read: every one, or four of them if
            ``POLYMOE_CHECK=sample``.

    Raises:
        ArgumentError: for another value of ``POLYMOE_CHECK`` than every or sample.
        FormatError: for NaN or infinity in codes, scales or biases, and for a matrix whose scales are all zero. The
            message names the expert and the projection.
        VerificationError: for an expert that is not in its place, or not as it was read.
    """
    check = _PackCheck(weights, device, where, compared_experts(weights.spec.local_experts) if compare else range(0))
    arriving = staged(replace(weights, read=check.read), device, check.arrived, check.offsets, check.arrived_together)
    packed = layout.pack(arriving, device, out)
    unpacked = layout.unpack(packed)
    check.require_numbers(unpacked)
    if compare:
        check.require_in_place(unpacked, layout.name)
    return packed


def compared_experts(count: int) -> Collection[int]:
    """Return which of ``count`` experts are compared after they were packed, as ``POLYMOE_CHECK`` says.

    Raises:
        ArgumentError: for another value than every or sample.
    """
    chosen = os.environ.get("POLYMOE_CHECK", "every")
    if chosen not in ("every", "sample"):
        raise ArgumentError("POLYMOE_CHECK", expected="every or sample", got=quoted(chosen))
    return range(count) if chosen == "every" else up_to_four(count)


def up_to_four(count: int) -> list[int]:
    """Return the first and the last of ``count`` experts, and two between them if there are more."""
    return sorted({round(i * (count - 1) / 3) for i in range(4)})


def require_input_scales(weights: ExpertWeights, where: str) -> None:
    """Refuse experts without static input scales before they are packed. Codes are not read.

    Raises:
        CheckpointError: naming the expert.
    """
    for e in range(weights.spec.local_experts):
        expert = weights.peek(e)
        for scale in (expert.gate_up_input_scale, expert.down_input_scale):
            if scale is None or not bool(torch.isfinite(scale) & (scale > 0)):
                raise CheckpointError(
                    f"{where}, expert {weights.spec.first_expert + e}",
                    expected="static input scales, for activations='fp8_static'",
                    got="none" if scale is None else str(float(scale)),
                    hint='the expert was never calibrated: load with activations="fp8_token" or "16bit"',
                )


class _PackCheck:
    """What is measured of each expert on its way into a layout, as numbers on the device."""

    def __init__(self, weights: ExpertWeights, device: torch.device, where: str, compared: Collection[int]) -> None:
        self._source, self._device, self._where, self._compared = weights, device, where, compared
        self.read = weights.read_unchecked or weights.read
        self.offsets = PartOffsets()
        self._checksums = Checksums(device, self.offsets)
        self._measured: list[tuple[list[tuple[int, str]], torch.dtype]] = []
        self._first: list[_Numbers] = []
        self._second: list[_Numbers] = []
        self._sums: dict[int, _Numbers] = {}

    @torch.no_grad()
    def arrived(self, e: int, expert: Expert, buffer: Tensor | None) -> None:
        parts = expert.parts()
        numbers = {n: t for n, t in parts.items() if has_numbers(t) and n not in INPUT_SCALES}
        for names, part in _stacked(numbers):
            first, second = _extremes(names[0], part, 1 if len(names) > 1 else None)
            self._note([(e, name) for name in names], part.dtype, first, second)
        if e in self._compared:
            self._sums[e] = _measured(
                self._checksums.of({name: part[None] for name, part in parts.items()})
                if buffer is None
                else self._checksums.of_buffer(buffer)
            )

    @torch.no_grad()
    def arrived_together(self, first: int, parts: Mapping[str, Tensor], buffers: Tensor) -> None:
        numbers = {n: t for n, t in parts.items() if has_numbers(t) and n not in INPUT_SCALES}
        for name, part in numbers.items():
            low, high = _extremes(name, part.flatten(1) if part.dim() > 1 else part[:, None], 1)
            self._note([(first + i, name) for i in range(len(part))], part.dtype, low, high)
        here = [e for e in range(first, first + len(buffers)) if e in self._compared]
        if here:
            sums = self._checksums.of_buffer(buffers)
            self._sums |= {e: _measured(sums[e - first : e - first + 1]) for e in here}

    def _note(self, of: list[tuple[int, str]], dtype: torch.dtype, first: Tensor, second: Tensor) -> None:
        self._measured.append((of, dtype))
        self._first.append(_measured(first))
        self._second.append(_measured(second))

    def require_numbers(self, packed: ExpertWeights) -> None:
        found = zip(self._measured, _read(self._first), _read(self._second), strict=True)
        for (of, dtype), first, second in found:
            for (e, name), low, high in zip(of, first, second, strict=True):
                self._require_numbers(packed, e, name, (dtype, low, high))

    def _require_numbers(
        self, packed: ExpertWeights, e: int, name: str, found: tuple[torch.dtype, float, float]
    ) -> None:
        finite = is_finite(*found)
        if finite and not (name.endswith(("scales", "global_scale")) and is_zero(*found)):
            return
        expert = self._source.expert(e)  # reading with checks names the tensor in the file
        if self._source.read_unchecked is None:
            expert.validate(self._name(e))
        if not finite:  # the sum of large numbers, or numbers that changed on their way
            packed.expert(e).validate(f"{self._name(e)}, packed,")
        # All scales of a slice may be zero if other scales of the matrix are not.

    @torch.no_grad()
    def require_in_place(self, packed: ExpertWeights, layout: str) -> None:
        local = self._compared
        before = dict(zip(local, _read([self._sums.get(e, []) for e in local]), strict=True))
        whole = len(local) == self._source.spec.local_experts
        some = (
            _in_blocks(packed) if whole else ({n: p[None] for n, p in packed.expert(e).parts().items()} for e in local)
        )
        sums = [x for block in _read([_measured(self._checksums.of(parts)) for parts in some]) for x in block]
        after = dict(zip(local, sums, strict=True))
        for e in local:
            if before[e] == [after[e]]:
                continue
            found, name = packed.expert(e), ""
            if before[e]:
                name = difference(self._source.expert(e).to(self._device), found)
                if name is None:
                    continue
            others = [other for other in local if before[other] == [after[e]]]
            raise VerificationError(
                f"{self._name(e)} {name}".rstrip(),
                expected=f"to be packed in layout {layout!r} as it was read",
                got=f"the weights of expert {self._source.spec.first_expert + others[0]}" if others else "other bytes",
                hint="this is a bug: report it with this message, and load with another backend meanwhile",
            )

    def _name(self, e: int) -> str:
        return f"{self._where}, expert {self._source.spec.first_expert + e}"


def difference(expert: Expert, other: Expert) -> str | None:
    """Return the name of the first part in which two experts on one device differ, or None.

    Bytes may differ where the numbers that they stand for do not, such as scales of groups of zeros.
    """
    parts, others = expert.parts(), other.parts()
    for name in {**parts, **others}:
        if name not in parts or name not in others:
            return name
        if not _same_bytes(parts[name], others[name]):
            numbers, other_numbers = _numbers(expert, name), _numbers(other, name)
            if numbers.shape != other_numbers.shape or not torch.equal(numbers, other_numbers):
                return name
    return None


def _extremes(name: str, part: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return what :func:`is_finite` judges, of all numbers of a part or of each slice."""
    if name.endswith("codes") and part.dtype.itemsize == 2:
        total = part.sum(dim)  # not finite if a number is not; on a CPU twice as fast as the extremes
        return total, total
    return extremes(part, dim)


def _in_blocks(weights: ExpertWeights) -> Iterator[Mapping[str, Tensor]]:
    """Yield the parts of all experts in order, [n, ...]: n experts at once where that is faster."""
    count, stacked = weights.spec.local_experts, weights.read_stacked
    if stacked is None:
        yield from ({name: part[None] for name, part in expert.parts().items()} for expert in weights)
        return
    size = max(1, _BLOCK_BYTES // weights.spec.expert_bytes)
    for first in range(0, count, size):
        yield stacked(first, min(first + size, count))


def _stacked(parts: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Yield names and a view [names, numbers] of parts of the same kind that are equally far apart in one buffer, as
    those of gate, up and down are: one launch then measures all of them. Yield other parts alone, as they are."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, part in parts.items():
        kinds.setdefault((part.dtype, part.numel(), name.rpartition(".")[2]), []).append(name)
    for names in kinds.values():
        some = [parts[name] for name in names]
        begins = [part.storage_offset() for part in some]
        steps = {second - first for first, second in pairwise(begins)}
        shared = len({part.untyped_storage().data_ptr() for part in some}) == 1
        if len(steps) == 1 and shared and min(steps) > 0 and all(part.is_contiguous() for part in some):
            yield names, some[0].as_strided((len(some), some[0].numel()), (steps.pop(), 1))
        else:
            yield from (([name], parts[name]) for name in names)


def _numbers(expert: Expert, name: str) -> Tensor:
    """Return the numbers that a part contributes to: a bias or input scale itself, or the dequantized projection."""
    projection, dot, _ = name.partition(".")
    return expert.projections[projection].dequantize() if dot else expert.vectors[name].float()


def _same_bytes(part: Tensor, other: Tensor) -> bool:
    a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (part, other))
    return part.dtype == other.dtype and torch.equal(a, b)


def _measured(numbers: Tensor) -> _Numbers:
    """Keep numbers of a GPU there, to be read with others. On a CPU read them: if small tensors outlive the large ones
    that are allocated beside them, the heap grows by as much for each expert."""
    return numbers.flatten().tolist() if numbers.is_cpu else numbers.flatten()


def _read(numbers: Sequence[_Numbers]) -> list[list[int | float]]:
    """Return each of ``numbers`` as a list. Those on the device are read once for each dtype."""
    found = {i: list(x) for i, x in enumerate(numbers) if not isinstance(x, Tensor)}
    there = {i: x for i, x in enumerate(numbers) if isinstance(x, Tensor)}
    for dtype in {x.dtype for x in there.values()}:
        some = {i: x for i, x in there.items() if x.dtype == dtype}
        values = iter(torch.cat(list(some.values())).tolist())
        found.update({i: [next(values) for _ in range(len(x))] for i, x in some.items()})
    return [found[i] for i in range(len(numbers))]
