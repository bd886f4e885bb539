"""Time to place the experts of a token in slots and to copy the missing ones: polymoe's two kernels beside FreeToken's.

FreeToken's are ``lru_ensure`` of flashlib 0.4.0 and ``fast_index_copy_multi_jit`` of freetoken 0.2.1, which compiles at
first use. Install both without dependencies, with apache-tvm-ffi. Both copy the same packed tensors from the same
page-locked memory, in CUDA graphs in which every call misses exactly so many experts; the bytes in the slots are
compared before anything is timed.

    python benchmarks/slot_peers.py gpt-oss-120b --out slot-peers-h100.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polymoe.bench.cases import Workload, case_named
from polymoe.bench.records import source, utc_now
from polymoe.bench.slots import missing_calls, packed_layer
from polymoe.bench.timing import TimedCalls
from polymoe.layer.offload import OffloadedExperts
from polymoe.machine import Machine

MISSES = (0, 1, 2, 4)


def main() -> None:
    """Print a line for each number of misses, and append records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", default=["gpt-oss-120b", "deepseek-v4-flash"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="if git does not know it")
    asked = parser.parse_args()
    device, machine = torch.device("cuda"), Machine.of("cuda")
    for name in asked.case:
        workload = Workload.of_case(case_named(name), device)
        experts, top_k = workload.problem.spec.local_experts, workload.problem.top_k
        layer = OffloadedExperts(packed_layer(workload, machine, device), experts // 4)
        for misses in (m for m in MISSES if m <= top_k):
            calls = missing_calls(experts, layer.slots, top_k, misses)
            times = {"polymoe": _polymoe(layer, calls), "freetoken": _freetoken(layer, calls)}
            print(f"{name}, {layer.slots} of {experts} slots, {misses} misses of {top_k} experts:", end=" ")
            print(", ".join(f"{who} {timing.median_us:.1f} us" for who, timing in times.items()), flush=True)
            line = {
                "case": name,
                "slots": layer.slots,
                "misses": misses,
                "expert_bytes": layer.expert_bytes,
                **{f"{who}_us": timing.median_us for who, timing in times.items()},
                "device": torch.cuda.get_device_name(),
                "versions": {p: metadata.version(p) for p in ("torch", "flashlib", "freetoken")},
                "commit": asked.commit or source(),
                "command": " ".join(["python benchmarks/slot_peers.py", *asked.case]),
                "time": utc_now(),
            }
            if asked.out is not None:
                with asked.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


def _timed(layer: OffloadedExperts, calls: list[Callable[[], None]], wanted: list[list[int]], slots_of: Any) -> Any:
    """Time the cycle of calls, after a comparison of what its last call needs with host memory."""
    timed = TimedCalls(calls, layer.device, graph=True)
    timed()
    slots = slots_of()
    for expert in wanted[-1]:
        for rows, host in zip(layer._rows.tensors, layer._host.tensors, strict=True):
            if not torch.equal(rows[slots[expert]].view(torch.uint8).cpu(), host[expert].view(torch.uint8)):
                raise SystemExit(f"expert {expert} is not in its slot")
    return timed.time(15, rest_seconds=0.5)


def _polymoe(layer: OffloadedExperts, calls: list[list[int]]) -> Any:
    layer._slots.empty()
    ids = [torch.tensor([experts], dtype=torch.int32, device=layer.device) for experts in calls]
    places: list[Tensor] = [torch.empty(0)]

    def call(ids_TA: Tensor) -> None:
        places[0] = layer._slots.place(ids_TA)

    return _timed(layer, [lambda i=i: call(i) for i in ids], calls, layer._slots.residents)


def _freetoken(layer: OffloadedExperts, calls: list[list[int]]) -> Any:
    lru_ensure: Any = import_module("flashlib.kernels.slot_cache").lru_ensure
    copy: Any = _freetoken_kernel("fast_index_copy").fast_index_copy_multi_jit
    device, count = layer.device, layer.problem.spec.local_experts
    parts = [(rows, host) for rows, host in zip(layer._rows.tensors, layer._host.tensors, strict=True) if rows.numel()]

    def ints(*values: int, size: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values * (size or 1), dtype=dtype, device=device)

    slot_of_id, id_of_slot = ints(-1, size=count), ints(-1, size=layer.slots)
    usage, step = ints(0, size=layer.slots, dtype=torch.int64), torch.zeros((), dtype=torch.int64, device=device)
    source_rows, slots = ints(0, size=count), ints(0, size=count)
    number = ints(0, dtype=torch.int64)
    to = ints(*(rows.data_ptr() for rows, _ in parts), dtype=torch.int64)
    from_ = ints(*(host.data_ptr() for _, host in parts), dtype=torch.int64)
    sizes = ints(*(rows[0].nbytes for rows, _ in parts), dtype=torch.int64)
    ids = [torch.tensor(experts, dtype=torch.int32, device=device) for experts in calls]
    places = torch.empty_like(ids[0])

    def call(query: Tensor) -> None:
        lru_ensure(query, slot_of_id, id_of_slot, usage, step, places, source_rows, slots, number)
        copy(to, from_, sizes, slots, source_rows, number)

    return _timed(layer, [lambda i=i: call(i) for i in ids], calls, slot_of_id.tolist)


def _freetoken_kernel(name: str) -> ModuleType:
    """Import one module of ``freetoken.kernel`` without the rest, which needs packages that this does not."""
    if "freetoken" not in sys.modules:
        spec = find_spec("freetoken")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("freetoken is not installed: pip install --no-deps flashlib==0.4.0 freetoken==0.2.1")
        root = Path(spec.submodule_search_locations[0])
        for package, folder in (("freetoken", root), ("freetoken.kernel", root / "kernel")):
            sys.modules[package] = module = ModuleType(package)
            module.__path__ = [str(folder)]
    return import_module(f"freetoken.kernel.{name}")


if __name__ == "__main__":
    main()
