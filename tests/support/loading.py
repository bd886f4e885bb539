"""Loads one layer from files in the page cache and prints as JSON how long it took and what memory it needed.

    python tests/loading.py CHECKPOINT LAYER DEVICE SMALL_CHECKPOINT LAYER BACKEND ACTIVATIONS

A process of its own, whose memory is compared with what it was after loading the small checkpoint.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch

import polymoe


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(path: str, layer: str, device: str, small: str, small_layer: str, backend: str, activations: str) -> None:
    load = partial(polymoe.load_experts, device=device, backend=backend, activations=activations)
    load(small, int(small_layer))
    for shard in Path(path).glob("*.safetensors"):
        with shard.open("rb") as file:
            while file.read(1 << 24):
                pass
    if device == "cuda":
        load(path, int(layer))  # compiles kernels, which is not what is timed
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    experts = load(path, int(layer), check=False)
    synchronize(device)
    packed_s = time.perf_counter() - start
    done.set()
    gpu_peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    start = time.perf_counter()
    experts.check()
    synchronize(device)
    found = {
        "packed_s": packed_s, "check_s": time.perf_counter() - start, "packed_bytes": experts.packed.nbytes,
        "expert_bytes": experts.problem.spec.expert_bytes, "experts": experts.problem.spec.experts,
        "host_growth_bytes": max(peak, anonymous_bytes()) - before, "gpu_peak_bytes": gpu_peak,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
