"""What experts in host memory take and cannot avoid, on a GPU: memory beside the experts, the link by kind of host
memory, and kernels that read experts in host memory themselves instead of copying them to slots.

    python benchmarks/offload_bounds.py --case gpt-oss-120b --layers 4 --out offload-bounds.jsonl

Three kinds of records:

- ``memory``: of layers with a quarter of their experts in slots, after calls of one token, calls in CUDA graphs and
  prompts. What the GPU holds beside slots and the two buffers that layers share, workspaces among it, and what the
  host holds beside the experts.
- ``link``: rates of the copy engine and of the kernel, from ordinary pages, from huge ones (transparent), and from each
  NUMA node.
- ``zero_copy``: one token, captured, by the resident layer's kernels: experts on the GPU, and all in host memory, from
  which the GEMMs read them. The bound that slots have to beat.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quantize_memory import own_bytes
from torch import Tensor

from polymoe.bench.cases import Workload, case_named
from polymoe.bench.link import measure_link
from polymoe.bench.records import source, utc_now
from polymoe.bench.slots import packed_layer
from polymoe.bench.timing import TimedCalls
from polymoe.layer.experts import FusedExperts
from polymoe.layer.host_store import on_cpus
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.runtime import LayerRuntime
from polymoe.machine import Machine, listed_cpus
from polymoe.problem.call import CallArguments

DEVICE = torch.device("cuda")


def call(layer: FusedExperts, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a call whose experts are drawn uniformly."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    spec, top_k = layer.problem.spec, layer.problem.top_k
    ids = torch.rand(tokens, spec.local_experts, device=DEVICE, generator=g).argsort(1)[:, :top_k]
    x = torch.randn(tokens, spec.hidden, device=DEVICE, generator=g).bfloat16()
    return x, ids + spec.first_expert, torch.rand(tokens, top_k, device=DEVICE, generator=g)


def held() -> tuple[int, int, int]:
    """Bytes that torch's tensors take, that torch has reserved, and that this process has in host memory."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), own_bytes()


def memory(resident: FusedExperts, layers: int) -> dict[str, Any]:
    """The ``memory`` record. ``resident`` stays, and does not count."""
    slots = resident.problem.spec.local_experts // 4
    arguments = {tokens: call(resident, tokens, 0) for tokens in (1, 64, 4096)}
    for given in arguments.values():  # what kernels load, and their workspaces, once
        resident(*given)
    before = held()
    offloaded = [OffloadedExperts(copy.deepcopy(resident), slots) for _ in range(layers)]
    for layer in offloaded:
        layer.reserve()
        for given in arguments.values():
            layer(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer(*arguments[tokens]) for layer in offloaded for tokens in (1, 64)]
    graph.replay()
    ends = held()
    experts, slot = layers * resident.packed.nbytes, offloaded[0].expert_bytes
    buffers = sum(t.nbytes for buffer in offloaded[0]._shared.buffers for t in buffer.tensors)
    in_slots = layers * slots * slot
    allocated, reserved, host = (after - first for after, first in zip(ends, before, strict=True))
    del graph, outs
    return {
        "layers": layers,
        "slots": slots,
        "slots_bytes": in_slots,
        "buffers_bytes": buffers,
        "gpu_beside_bytes": allocated - in_slots - buffers,
        "gpu_reserved_beside_bytes": reserved - in_slots - buffers,
        "experts_bytes": experts,
        "host_beside_bytes": host - experts,
        "host_beside_share": round((host - experts) / experts, 5),
    }


def huge_pages(size: int) -> Tensor:
    """Host memory for which the kernel is asked to take transparent huge pages."""
    area = mmap.mmap(-1, size + 2 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets none
    area.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(area, dtype=torch.uint8)
    start = -tensor.data_ptr() % (2 * 2**20)
    return tensor[start : start + size]


def ordinary_pages(size: int) -> Tensor:
    """Host memory for which it is asked not to."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def nodes() -> dict[str, set[int]]:
    """CPUs of each NUMA node on which this process may run."""
    found = {}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        if usable := listed_cpus(path / "cpulist") & os.sched_getaffinity(0):
            found[path.name] = usable
    return found


def anonymous_huge_bytes() -> int:
    """Bytes of this process in transparent huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("AnonHugePages")))


def links() -> Iterator[dict[str, Any]]:
    """The ``link`` records."""
    makers: dict[str, Callable[[int], Tensor]] = {"ordinary pages": ordinary_pages, "huge pages": huge_pages}
    for name, make in makers.items():
        found = dict[str, int]()

        def made(size: int, make: Callable[[int], Tensor] = make, found: dict[str, int] = found) -> Tensor:
            before, tensor = anonymous_huge_bytes(), make(size)
            tensor.fill_(1)
            found["huge_bytes"] = anonymous_huge_bytes() - before
            return tensor

        yield {"memory": name, **asdict(measure_link(DEVICE, made)), **found}
        gc.collect()
    for name, cpus in nodes().items():
        with on_cpus(cpus):  # so are the threads that fill it
            yield {"memory": name, **asdict(measure_link(DEVICE, lambda size: ordinary_pages(size).fill_(0)))}


class HostPointer:
    """Page-locked host memory as CUDA's array interface presents it: kernels get the address, as that of any tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.owner = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def zero_copy(resident: FusedExperts) -> dict[str, Any]:
    """The ``zero_copy`` record."""
    offloaded = OffloadedExperts(copy.deepcopy(resident), resident.problem.spec.local_experts // 4)
    seen = [
        torch.as_tensor(HostPointer(t), device=DEVICE).view(t.dtype).view(t.shape) if t.numel() else t.to(DEVICE)
        for t in offloaded._host.tensors
    ]
    assert all(
        t.data_ptr() == host.data_ptr() for t, host in zip(seen, offloaded._host.tensors, strict=True) if t.numel()
    )
    in_host = LayerRuntime(resident._plans, seen)
    calls = [call(resident, 1, seed) for seed in range(32)]
    times, bits = [], []
    for runtime in (resident._runtime, in_host):
        outs = [torch.empty_like(x) for x, _, _ in calls]
        made = [
            partial(_run, runtime, CallArguments(*arguments, out)) for arguments, out in zip(calls, outs, strict=True)
        ]
        times.append(TimedCalls(made, DEVICE, graph=True).time(5, rest_seconds=0.2).median_us)
        bits.append(outs)
    size = resident.problem.top_k * offloaded.expert_bytes
    return {
        "tokens": 1,
        "resident_us": round(times[0], 2),
        "host_us": round(times[1], 2),
        "expert_bytes": offloaded.expert_bytes,
        "host_bytes_per_s": round(size / (times[1] - times[0]) * 1e6),
        "same_bits": all(torch.equal(a, b) for a, b in zip(*bits, strict=True)),
    }


def _run(runtime: LayerRuntime, arguments: CallArguments) -> None:
    runtime.run(arguments)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="gpt-oss-120b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--commit", default=source())
    parser.add_argument("--out", type=Path, help="append the records to this file")
    args = parser.parse_args()
    machine = Machine.of()
    stamp: dict[str, Any] = {"case": args.case, "device": machine.device.name, "torch": torch.__version__}
    stamp |= {"commit": args.commit, "date": utc_now()}

    def write(kind: str, record: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **record, **stamp})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    resident = packed_layer(Workload.of_case(case_named(args.case), DEVICE), machine, DEVICE)
    write("memory", memory(resident, args.layers))
    gc.collect()
    for record in links():
        write("link", record)
    write("zero_copy", zero_copy(resident))


if __name__ == "__main__":
    main()
