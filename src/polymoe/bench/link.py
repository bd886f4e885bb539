"""How fast a GPU gets experts from host memory: by its copy engine, and by the kernel that reads host memory itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from polymoe.bench.timing import TimedCalls
from polymoe.errors import ArgumentError, VerificationError
from polymoe.kernels.cuda.driver import mapped_address
from polymoe.kernels.cuda.slots import SlotLaunches
from polymoe.kernels.cuda.targets import target_for
from polymoe.layer.host_store import PageLocked, near
from polymoe.layer.runtime import on_device
from polymoe.machine import Machine
from polymoe.machine.link import MeasuredLink
from polymoe.problem.call import device_name

_RECORD_BYTES = 13 * 2**20  # about an expert of gpt-oss-120b in MXFP4
_SLOTS, _RECORDS = 32, 96
_ORDINARY = partial(torch.empty, dtype=torch.uint8)


def measure_link(
    device: torch.device | str = "cuda", make_host: Callable[[int], torch.Tensor] = _ORDINARY
) -> MeasuredLink:
    """Measure the link with 96 experts of 13 MiB, in random order and in CUDA graphs, of which no 32 in a row are the
    same, so that all are misses.

    Args:
        device: the GPU.
        make_host: returns host memory of so many bytes, uint8. Meanwhile this thread is on the GPU's NUMA node if it
            may run there, as for a layer's.

    Raises:
        ArgumentError: for a device that is no GPU.
        PlanError: if so much host memory cannot be page-locked.
        VerificationError: if other bytes arrive than were there.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ArgumentError("link", expected="a GPU", got="none" if device.type == "cuda" else str(device))
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    with on_device(device):
        size = _RECORDS * _RECORD_BYTES
        with near(device):
            host = make_host(size).view(_RECORDS, _RECORD_BYTES).copy_(torch.arange(_RECORDS).to(torch.uint8)[:, None])
        locked = PageLocked([host])
        slots = torch.empty(_SLOTS, _RECORD_BYTES, dtype=torch.uint8, device=device)
        order = torch.randperm(_RECORDS, generator=torch.Generator().manual_seed(0))
        target = target_for(torch.cuda.get_device_capability(device))
        launches = SlotLaunches(target, 0, _RECORDS, [slots], [mapped_address(host.data_ptr())])

        def copy(slot: int) -> None:
            slots[slot].copy_(host[order[slot]], non_blocking=True)

        def fetch(experts: torch.Tensor) -> None:
            launches.run(experts, torch.cuda.current_stream().cuda_stream)

        def us_each(calls: list[partial[None]]) -> float:
            return TimedCalls(calls, device, graph=True).time(5).median_us

        copy_us = us_each([partial(copy, slot) for slot in range(_SLOTS)])
        _require(slots[:, -1].tolist() == [int(order[slot]) for slot in range(_SLOTS)], device)
        groups = [group[:, None].to(device) for group in order.split(_SLOTS)]
        kernel_us = us_each([partial(fetch, group) for group in groups]) / _SLOTS
        slot_of = launches.residents()
        _require(all(int(slots[slot, -1]) == e for e, slot in enumerate(slot_of) if slot >= 0), device)
        record_us = us_each([partial(fetch, order[e : e + 1, None].to(device)) for e in range(_RECORDS)])
        del locked
    name = Machine.of(device_name(device)).device.name
    return MeasuredLink(
        device=name,
        copy_bytes_per_s=_RECORD_BYTES / copy_us * 1e6,
        kernel_bytes_per_s=_RECORD_BYTES / kernel_us * 1e6,
        record_bytes=_RECORD_BYTES,
        record_us=record_us,
    )


def _require(right: bool, device: torch.device) -> None:
    if not right:
        raise VerificationError(f"copies from host memory to {device}", expected="the bytes there", got="others")
