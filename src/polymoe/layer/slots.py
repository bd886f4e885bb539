"""Slots: which experts of a layer lie on the GPU while all of them lie in host memory, and calls of several waves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polymoe.common.shapes import ceil_div
from polymoe.errors import UnsupportedProblem
from polymoe.kernels.cuda.driver import CapturedLoop, DriverError, mapped_address
from polymoe.kernels.cuda.slots import MOST_EXPERTS, MOST_PARTS, NEXT_WAVE, SlotLaunches
from polymoe.kernels.cuda.targets import target_for
from polymoe.layer.runtime import BoundStep, on_device
from polymoe.machine import driver_cuda
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertsSpec


class LeastRecentlyUsed:
    """Which expert is in which slot. Of slots that a call does not need, missing experts get those used least recently,
    in order of id; ties go by slot. ``kernels/cuda/slots.cu`` does the same on a GPU.

    Args:
        slots: their number.
    """

    def __init__(self, slots: int) -> None:
        self.slot_of: dict[int, int] = {}
        self._last_use, self._step = [0] * slots, 0

    def place(self, experts: Sequence[int]) -> list[tuple[int, int]]:
        """Give each of ``experts`` (distinct, at most as many as slots) a slot.

        Returns:
            ``(expert, slot)`` of those that were in none, and have to be copied.
        """
        self._step += 1
        needed = {self.slot_of[e] for e in experts if e in self.slot_of}
        missing = sorted(e for e in experts if e not in self.slot_of)
        others = (slot for slot in range(len(self._last_use)) if slot not in needed)
        placed = list(zip(missing, sorted(others, key=self._last_use.__getitem__), strict=False))
        expert_of = {slot: expert for expert, slot in self.slot_of.items()}
        for expert, slot in placed:
            if slot in expert_of:
                del self.slot_of[expert_of[slot]]
            self.slot_of[expert] = slot
        for expert in experts:
            self._last_use[self.slot_of[expert]] = self._step
        return placed


class CpuSlots:
    """Slots of a layer on a CPU, where copies are torch's.

    Args:
        spec: the layer's experts.
        rows: the packed tensors of the slots, in the order of ``host``.
        host: those of all experts. Both lists are read at each call.
    """

    def __init__(self, spec: ExpertsSpec, rows: list[Tensor], host: list[Tensor]) -> None:
        self.spec, self.rows, self.host = spec, rows, host
        self._hits = self._misses = 0
        self.empty()

    def place(self, ids_TA: Tensor, wave: int = 0, slot_ids_TA: Tensor | None = None) -> Tensor:
        """Put the experts of a call into slots; return the ids of these, [T, A], or -1 for experts of other waves.

        A call that needs more experts than there are slots has several waves, each of at most as many: the first takes
        those that are in slots, then missing ones in order of id, and each of the others the next ones. The result is
        written to ``slot_ids_TA`` if that is given.
        """
        first, places = self.spec.first_expert, torch.full((self.spec.local_experts,), -1, dtype=ids_TA.dtype)
        local_TA = ids_TA - first
        here_TA = (local_TA >= 0) & (local_TA < self.spec.local_experts)
        if not wave:
            self._ordered = sorted(local_TA[here_TA].unique().tolist(), key=lambda e: (e not in self._lru.slot_of, e))
        count = len(self.rows[0])
        needed = self._ordered[wave * count : (wave + 1) * count]
        placed = self._lru.place(needed)
        self._hits += len(needed) - len(placed)
        self._misses += len(placed)
        try:
            for rows, host in zip(self.rows, self.host, strict=True):
                for expert, slot in placed:
                    rows[slot].copy_(host[expert])
        except BaseException:
            self.empty()
            raise
        for expert in needed:
            places[expert] = first + self._lru.slot_of[expert]
        placed_TA = places[local_TA.masked_fill(~here_TA, 0).long()].masked_fill(~here_TA, -1)
        return placed_TA if slot_ids_TA is None else slot_ids_TA.copy_(placed_TA)

    def waves(self, most: int, *, repeatable: bool) -> Iterator[int]:
        """Yield the number of each wave of a call, of which there are at most ``most``. ``repeatable``: a wave
        allocates nothing."""
        yield from range(most)

    def residents(self) -> dict[int, int]:
        """Return the slot of each expert that is in one, by its number among the layer's."""
        return dict(self._lru.slot_of)

    def counts(self) -> tuple[int, int]:
        """Return hits and misses."""
        return self._hits, self._misses

    def empty(self) -> None:
        """Forget what the slots hold."""
        self._lru = LeastRecentlyUsed(len(self.rows[0]))


class GpuSlots:
    """Slots of a layer on a GPU, as :class:`CpuSlots`, by kernels that read host memory themselves.

    Raises:
        UnsupportedProblem: for more experts or packed tensors than the kernels have room for, or another GPU, also one
            that does not read page-locked host memory.
    """

    def __init__(self, spec: ExpertsSpec, rows: list[Tensor], host: list[Tensor]) -> None:
        where = "experts in host memory"
        if spec.local_experts > MOST_EXPERTS or len(rows) > MOST_PARTS:
            expected = f"at most {MOST_EXPERTS} experts of {MOST_PARTS} packed tensors"
            raise UnsupportedProblem(where, expected=expected, got=f"{spec.local_experts} of {len(rows)}")
        try:
            target = target_for(torch.cuda.get_device_capability(rows[0].device))
        except LookupError as error:
            raise UnsupportedProblem(where, expected="a GPU from SM80 to SM121", got=str(error)) from error
        self._condition = 0  # of the loop that a graph is being given
        if (driver := driver_cuda()) is not None and driver < (12, 4):
            expected = "a driver of CUDA 12.4 or newer, whose graphs have loops"
            raise UnsupportedProblem(where, expected=expected, got=f"CUDA {driver[0]}.{driver[1]}")
        kept = [(slots, tensor) for slots, tensor in zip(rows, host, strict=True) if slots.numel()]
        with on_device(rows[0].device):
            try:
                addresses = [mapped_address(tensor.data_ptr()) for _, tensor in kept]
            except DriverError as error:
                expected, hint = "a GPU that reads page-locked host memory", "load without slots and expert_memory"
                raise UnsupportedProblem(where, expected=expected, got=str(error), hint=hint) from error
            self._launches = SlotLaunches(
                target, spec.first_expert, spec.local_experts, [slots for slots, _ in kept], addresses
            )

    def place(self, ids_TA: Tensor, wave: int = 0, slot_ids_TA: Tensor | None = None) -> Tensor:
        """See :meth:`CpuSlots.place`. Nothing waits; CUDA graphs capture it."""
        stream = torch.cuda.current_stream(ids_TA.device).cuda_stream
        return self._launches.run(ids_TA.contiguous(), stream, wave, slot_ids_TA=slot_ids_TA, condition=self._condition)

    def waves(self, most: int, *, repeatable: bool) -> Iterator[int]:
        """See :meth:`CpuSlots.waves`. A CUDA graph that is being captured gets the second one, on another stream, and
        repeats it as often as a call needs.
        """
        if most < 2 or not (repeatable and torch.cuda.is_current_stream_capturing()):
            yield from range(most)
            return
        loop = CapturedLoop(torch.cuda.current_stream().cuda_stream)
        self._condition = loop.condition
        try:
            yield 0
            with loop.body() as stream, torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                yield NEXT_WAVE
        finally:
            self._condition = 0

    def residents(self) -> dict[int, int]:
        """See :meth:`CpuSlots.residents`. Waits for the GPU."""
        return {expert: slot for expert, slot in enumerate(self._launches.residents()) if slot >= 0}

    def counts(self) -> tuple[int, int]:
        """Return hits and misses. Waits for the GPU."""
        return self._launches.counts()

    def empty(self) -> None:
        """Forget what the slots hold."""
        self._launches.empty()


def run_in_waves(
    slots: CpuSlots | GpuSlots, step: BoundStep, problem: Problem, call: CallArguments, count: int
) -> None:
    """Run a call that may need more experts than there are ``count`` slots, without the host: as many waves as the most
    that it may need. Each computes the rows of its experts, and at the end they are added as a resident layer adds
    them. For that, each of a token's experts is a token of its own, whose result stays float32, so that it is the row
    itself.

    Args:
        slots: of the layer.
        step: of the plan for the call's tokens, bound to the slots.
        problem: what runs.
        call: its arguments, with ``out``.
        count: slots.
    """
    ids_TA, weights_TA, device = call.topk_ids_TA.contiguous(), call.topk_weights_TA, call.x_TH.device
    rows, top_k = ids_TA.numel(), ids_TA.shape[1]
    # Allocated here: a wave that a graph repeats must not allocate.
    slot_ids_TA = torch.empty(ids_TA.shape, dtype=torch.int32, device=device)
    in_wave_R1 = torch.empty(rows, 1, dtype=torch.bool, device=device)
    workspace = None
    if needed := step.runner.workspace_bytes(rows, 1, step.config):
        workspace = torch.empty(needed, dtype=torch.uint8, device=device)

    def of_rows(tensor: Tensor) -> Tensor:
        return tensor[:, None].expand(-1, top_k, -1).reshape(rows, -1)

    weights_R1 = (weights_TA if problem.weight_on == "input" else torch.ones_like(weights_TA)).reshape(rows, 1)
    part = call._replace(
        x_TH=of_rows(call.x_TH),
        topk_ids_TA=slot_ids_TA.view(rows, 1),
        topk_weights_TA=weights_R1,
        workspace=workspace,
        x_scales=None if call.x_scales is None else of_rows(call.x_scales),
    )
    y_RH, new_RH = torch.empty(2, rows, problem.spec.hidden, dtype=torch.float32, device=device)
    most = ceil_div(min(problem.spec.local_experts, rows), count)
    repeatable = call.x_TH.dtype is torch.bfloat16 and call.x_scales is None  # what else there is, runners convert
    for wave in slots.waves(most, repeatable=repeatable):
        slots.place(ids_TA, wave, slot_ids_TA)
        out_RH = new_RH if wave else y_RH  # rows of other waves become 0
        step.runner.run(part._replace(out=out_RH), step.config)
        if wave:
            torch.ge(part.topk_ids_TA, 0, out=in_wave_R1)
            torch.where(in_wave_R1, new_RH, y_RH, out=y_RH)
    step.runner.add_rows(y_RH, call, step.config)
