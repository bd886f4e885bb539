"""Loads one layer from files in the page cache and prints as JSON how long it took and what memory it needed.

    python tests/support/loading.py CHECKPOINT LAYER DEVICE SMALL_CHECKPOINT LAYER BACKEND ACTIVATIONS

A process of its own, whose memory is compared with what it was after loading the small checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import polymoe
from polymoe.formats import FORMATS, QuantTensor
from polymoe.layouts import Layout, Packed
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights

V4 = Path(__file__).parents[2] / "models" / "sums-deepseek-v4-mxfp4"


def deepseek_v4_flash_layer(path: Path, experts: int) -> None:
    """Layer 3 with random codes and scales between 2**-9 and 2**-6, under DeepSeek-V4's names: 13.4 MB an expert."""
    hidden, intermediate, mxfp4 = 4096, 2048, FORMATS["mxfp4"].encoding
    spec = ExpertsSpec(hidden=hidden, intermediate=intermediate, experts=experts, gate=mxfp4, up=mxfp4, down=mxfp4)

    def matrix(rows: int, columns: int) -> QuantTensor:
        codes = torch.empty(rows, columns // 16, dtype=torch.int64).random_().view(torch.uint8)
        scales = torch.randint(118, 122, (rows, columns // 32), dtype=torch.uint8)
        return QuantTensor(codes, mxfp4, scales.view(torch.float8_e8m0fnu))

    def read(e: int) -> Expert:
        gate, up = matrix(intermediate, hidden), matrix(intermediate, hidden)
        return Expert(gate=gate, up=up, down=matrix(hidden, intermediate))

    sizes = {"hidden_size": hidden, "moe_intermediate_size": intermediate, "n_routed_experts": experts}
    config = json.loads((V4 / "config.json").read_text()) | sizes
    polymoe.write_checkpoint(path, config, {3: ExpertWeights(spec, read)})


def measured(
    path: Path,
    layer: int,
    device: str,
    small: Path,
    small_layer: int,
    backend: str = "auto",
    activations: str = "16bit",
) -> dict[str, float]:
    """What this file, as a program, prints."""
    arguments = (__file__, path, layer, device, small, small_layer, backend, activations)
    run = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    print(found)
    return found


@contextmanager
def checks_of_few_experts_only() -> Iterator[None]:
    """Within it, layers are packed without checking every expert. Scales are then checked by the host, when it reads
    them, and the results of four experts are compared."""

    def pack(layout: Layout, weights: ExpertWeights, device: torch.device, *_: object, **__: object) -> Packed:
        return layout.pack(weights, device)

    with (
        patch("polymoe.layer.runtime.pack_checked", pack),
        patch("polymoe.layer.runtime.kept", lambda weights: weights),
    ):
        yield


def load_seconds(path: Path, layer: int, device: str, backend: str, activations: str, repeats: int = 9) -> list[float]:
    """The least time, of some that alternate, to load a layer from the page cache: with the checks of a few experts
    only, and with those of every expert. Kernels are compiled before."""
    least = [float("inf")] * 2
    for turn in range(-1, 2 * repeats):
        few = turn % 2 == 0
        with checks_of_few_experts_only() if few else nullcontext():
            start = time.perf_counter()
            polymoe.load_experts(path, layer, device=device, backend=backend, activations=activations)
            synchronize(device)
            if turn >= 0:
                least[not few] = min(least[not few], time.perf_counter() - start)
    return least


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
    with patch("polymoe.layer.experts.check_layer"):  # which needs memory for a dequantized expert
        experts = load(path, int(layer))
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
