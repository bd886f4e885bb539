"""The rate at which a GPU reads its memory, and that of a copy: which bandwidth a floor may take.

    python benchmarks/read_bandwidth.py [FILE]    prints rates; appends a JSON line for each to FILE

A persistent grid reads 16 GB from front to back in 16-byte loads that leave the caches first, and adds them up; the sum
is compared with torch's. A copy moves the same bytes twice, once in each direction. A rate is that of the median of 15
passes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymoe.bench.records import Stamp, check_writable
from polymoe.bench.timing import TimedCalls
from polymoe.common.atomic import append_line
from polymoe.machine import Machine

BYTES = 16 * 10**9
BLOCK_BYTES = 2**16
CTAS_PER_SM = (4, 8, 16)
WARPS = (8, 16, 32)


@triton.jit
def read(x, sums, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up int32 words, modulo 2**32, BLOCK at a time; every program writes one sum."""
    words = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    x += tl.program_id(0).to(tl.int64) * BLOCK
    for _ in range(tl.program_id(0), blocks, tl.num_programs(0)):
        total += tl.load(x + words, eviction_policy="evict_first")
        x += tl.num_programs(0) * BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total))


def main() -> int:
    """See the module."""
    if len(sys.argv) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    out, device = Path(sys.argv[1]) if len(sys.argv) == 2 else None, torch.device("cuda")
    if out:
        check_writable(out)
    stamp = Stamp.now(Machine.of("cuda"), " ".join(["python", *sys.argv]))
    blocks = BYTES // BLOCK_BYTES
    x = torch.randint(-(2**31), 2**31, (blocks * BLOCK_BYTES // 4,), dtype=torch.int32, device=device)
    expected = x.sum().item() % 2**32
    moved = x.numel() * 4

    def report(what: str, run: Callable[[], None], times_bytes: int, **more: Any) -> None:
        timing = TimedCalls([run], device, graph=True).time(rest_seconds=0.2)
        rate = times_bytes * moved / timing.median_us * 1e-6
        print(f"{what} {more}: {rate:.3f} TB/s, {timing.median_us:.0f} us", flush=True)
        if out:
            record = {
                "what": what, **more, "bytes": times_bytes * moved, "median_us": round(timing.median_us, 1),
                "p25_us": round(timing.p25_us, 1), "p75_us": round(timing.p75_us, 1), "tb_s": round(rate, 4),
                **stamp.fields(),
            }  # fmt: skip
            append_line(out, json.dumps(record))

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for ctas in CTAS_PER_SM:
        for warps in WARPS:
            sums = torch.zeros(sms * ctas, dtype=torch.int32, device=device)
            run: Callable[[], Any] = partial(read[(sms * ctas,)], x, sums, blocks, BLOCK_BYTES // 4, num_warps=warps)
            run()
            if sums.sum().item() % 2**32 != expected:
                raise SystemExit(f"read with {ctas} CTAs per SM and {warps} warps: the sum is wrong")
            report("read", run, 1, ctas_per_sm=ctas, warps=warps)
    to: Tensor = torch.empty_like(x)
    report("copy", partial(to.copy_, x), 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
