"""Time and memory of `polymoe.load` with experts that are quantized while loading, beside those in BF16.

    python benchmarks/load_memory.py /dev/shm/work --layers 32 --experts mxfp4 --out benchmarks/results/load.jsonl

The model has the layers of Qwen3-30B-A3B in BF16 and random weights (1.2 GB each). Each load is a process of its own,
and reads files that are in memory. Host memory is what the process itself holds: pages of mapped files, which the
system can drop, do not count. What a GPU holds after the load is the packed size.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import transformers
from quantize_memory import ROOT, own_bytes, write_model

import polymoe


def measure(model: Path, experts: str | None, device: str) -> dict[str, object]:
    """Load the model once in this process."""
    gpu = device.startswith("cuda")
    if gpu:
        torch.zeros(1, device=device)  # the context is not part of a load
    before = own_bytes()
    most, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], own_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    start = time.perf_counter()
    loaded, _ = polymoe.load(model, device=device, experts=experts)
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    memory = {
        "gpu_bytes": torch.cuda.memory_allocated(device),
        "gpu_most_bytes": torch.cuda.max_memory_allocated(device),
        "gpu_most_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }
    del loaded
    return {"seconds": round(seconds, 1), "own_memory_bytes": most[0] - before} | (memory if gpu else {})


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="for the model")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--experts", nargs="+", default=["bf16", "mxfp4"], help="formats; bf16 quantizes nothing")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8, help="layers that are written at a time")
    parser.add_argument("--write-only", action="store_true", help="write the model and load nothing")
    parser.add_argument("--out", type=Path, help="append the records to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.directory / f"bf16-{args.layers}-layers"
    if not model.exists():
        write_model(model, args.layers, args.workers)
    if args.write_only:
        return
    if args.one is not None:
        print(json.dumps(measure(model, None if args.one == "bf16" else args.one, args.device)))
        return
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else f"{os.cpu_count()} cores"
    for experts in args.experts:
        one = [sys.executable, __file__, str(args.directory), "--layers", str(args.layers)]
        done = subprocess.run(
            [*one, "--device", args.device, "--one", experts], stdout=subprocess.PIPE, text=True, check=True
        )
        record = {
            "experts": experts, "bytes": size, **json.loads(done.stdout.splitlines()[-1]), "device": name,
            "torch": torch.__version__, "transformers": transformers.__version__, "commit": commit.strip(),
            "date": datetime.date.today().isoformat(), "command": "python " + shlex.join(sys.argv),
        }  # fmt: skip
        print(json.dumps(record), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
