"""Launches that give experts slots on the GPU and copy those that are in none, without the host: see ``slots.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.launch.args import fields
from polymoe.kernels.cuda.targets import Target

MOST_EXPERTS, MOST_PARTS = 1024, 16
"""Experts of a layer, and packed tensors, that the kernels have room for."""

NEXT_WAVE = -1
"""The wave after the last one that was placed, of which only the GPU knows the number."""

_THREADS = 512
_CTAS = 16  # that copy: 1 MB is on its way, as much as the rate of PCIe 5 times its latency needs many times over


class PlaceExpertsArgs(ctypes.Structure):
    """Arguments of ``place_experts``; the source documents the fields."""

    _fields_ = fields(
        "pointers ids slot_ids slot_of_expert expert_of_slot misses last_use counters wave_of_expert waves",
        "unsigned_longs condition",
        "ints rows first_expert experts slots long_ids wave",
    )


class FetchExpertsArgs(ctypes.Structure):
    """Arguments of ``fetch_experts``; the source documents the fields."""

    _fields_ = (
        ("misses", ctypes.c_void_p),
        ("from_", ctypes.c_void_p * MOST_PARTS),
        ("to", ctypes.c_void_p * MOST_PARTS),
        ("bytes", ctypes.c_longlong * MOST_PARTS),
        ("parts", ctypes.c_int),
    )


class SlotLaunches:
    """Which expert of a layer lies in which slot, on the device, and the two launches that change it.

    Args:
        target: the set of cubins.
        first_expert, experts: the first id and the number of experts on this rank; at most :data:`MOST_EXPERTS`.
        slots: the packed tensors of the slots, each [S, ...] and contiguous; at most :data:`MOST_PARTS`.
        host: the device's address of each tensor [E, ...] in page-locked memory.
    """

    def __init__(
        self, target: Target, first_expert: int, experts: int, slots: Sequence[Tensor], host: Sequence[int]
    ) -> None:
        count, device = len(slots[0]), slots[0].device
        self.experts, self.slots = experts, count
        sizes = [experts, count, 1 + 2 * count, experts, 2]
        ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        self._slot_of_expert, self._expert_of_slot, self._misses, wave_of_expert, waves = ints.split(sizes)
        longs = torch.empty(count + 3, dtype=torch.int64, device=device)
        self._last_use, self._counters = longs.split([count, 3])
        self._counters.zero_()
        self.empty()
        self._place_args = PlaceExpertsArgs(
            slot_of_expert=self._slot_of_expert.data_ptr(),
            expert_of_slot=self._expert_of_slot.data_ptr(),
            misses=self._misses.data_ptr(),
            last_use=self._last_use.data_ptr(),
            counters=self._counters.data_ptr(),
            wave_of_expert=wave_of_expert.data_ptr(),
            waves=waves.data_ptr(),
            first_expert=first_expert,
            experts=experts,
            slots=count,
        )
        args = self._fetch_args = FetchExpertsArgs(misses=self._misses.data_ptr(), parts=len(slots))
        for part, (tensor, address) in enumerate(zip(slots, host, strict=True)):
            args.from_[part], args.to[part] = address, tensor.data_ptr()
            args.bytes[part] = tensor[0].numel() * tensor.element_size()
        self._place = modules.kernel("slots", "place_experts", target).prepare(self._place_args, _THREADS)
        self._fetch = modules.kernel("slots", "fetch_experts", target).prepare(args, _THREADS)
        self._fetch.set_grid(_CTAS)

    def empty(self) -> None:
        """Mark all slots as empty; counts stay."""
        self._slot_of_expert.fill_(-1)
        self._expert_of_slot.fill_(-1)
        self._misses.zero_()
        self._last_use.zero_()

    def run(
        self, ids_TA: Tensor, stream: int, wave: int = 0, *, slot_ids_TA: Tensor | None = None, condition: int = 0
    ) -> Tensor:
        """Put the experts of a call into slots, and return the ids under which they lie there.

        Args:
            ids_TA: int32 or int64, contiguous.
            stream: of torch's current device.
            wave: of a call that needs more experts than there are slots; each of its waves, in order, has at most as
                many. All are needed in ``ceil(experts / slots)`` waves. :data:`NEXT_WAVE`: the one after the last.
            slot_ids_TA: where the result is written, instead of a new tensor.
            condition: of a loop in a CUDA graph, set to whether the call needs further waves.

        Returns:
            int32 [T, A]: first expert plus slot, or -1 where an id is of another wave, or no expert's of this rank.
        """
        if slot_ids_TA is None:
            slot_ids_TA = torch.empty(ids_TA.shape, dtype=torch.int32, device=ids_TA.device)
        args = self._place_args
        args.condition = condition
        args.ids, args.slot_ids = ids_TA.data_ptr(), slot_ids_TA.data_ptr()
        args.rows, args.long_ids, args.wave = ids_TA.numel(), ids_TA.dtype == torch.int64, wave
        self._place(stream)
        self._fetch(stream)
        return slot_ids_TA

    def residents(self) -> list[int]:
        """Return the slot of each expert, or -1. Waits for the device."""
        return self._slot_of_expert.tolist()

    def counts(self) -> tuple[int, int]:
        """Return hits and misses since the launches were made. Waits for the device."""
        _, hits, misses = self._counters.tolist()
        return hits, misses
