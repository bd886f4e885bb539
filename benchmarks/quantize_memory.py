"""Time and memory of `polymoe quantize` on a model of random weights.

    python benchmarks/quantize_memory.py /tmp/work --layers 3 --out benchmarks/results/quantize.jsonl

The model has the layers of Qwen3-30B-A3B in BF16 (1.2 GB of experts each). Memory is what the process itself holds:
pages of mapped files, which the system can drop, do not count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polymoe.checkpoint.quantize import quantize_checkpoint

ROOT = Path(__file__).resolve().parents[1]


def write_model(directory: Path, layers: int, workers: int = 1) -> None:
    """Write a model in BF16 that does not exist yet; each worker holds a layer in memory."""
    sys.path.insert(0, str(ROOT / "models"))
    import random_qwen3_fp8 as sizes
    from random_gpt_oss import uniform, write

    def shards(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for shard in sizes.shards(config):
            yield {name: make for name, make in shard.items() if not name.endswith("scale_inv")}

    sizes._codes = lambda *shape: uniform(*shape, std=shape[-1] ** -0.5)
    config = {key: value for key, value in sizes.qwen3_30b(layers=layers).items() if key != "quantization_config"}
    write(directory, config, shards=shards, workers=workers)


def own_bytes() -> int:
    """Memory of this process that belongs to no file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="for the model and the result")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--format", default="mxfp4")
    parser.add_argument("--out", type=Path, help="append the record to this file")
    args = parser.parse_args()
    model = args.directory / f"bf16-{args.layers}-layers"
    if not model.exists():
        write_model(model, args.layers)
    most, stop = [own_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], own_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    wall, processor = time.perf_counter(), time.process_time()
    result = args.directory / f"{args.format}-{args.layers}-layers"
    report = quantize_checkpoint(model, args.format, result, progress=lambda text: print(text, file=sys.stderr))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    stop.set()
    thread.join()
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    record = {
        "format": args.format, "bytes": size, "expert_weights": args.layers * 128 * 3 * 768 * 2048,
        "seconds": round(wall, 1), "processor_seconds": round(processor, 1),
        "threads": torch.get_num_threads(), "own_memory_bytes": most[0],
        "error": report["layers"][0]["up"]["error"], "device": f"{os.cpu_count()} cores {platform.machine()}",
        "torch": torch.__version__, "commit": commit.strip(), "date": datetime.date.today().isoformat(),
        "command": "python " + shlex.join(sys.argv),
    }  # fmt: skip
    print(json.dumps(record))
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
