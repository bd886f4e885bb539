"""Packed models that Transformers splits over several GPUs, beside the same models on one.

    torchrun --nproc-per-node 2 benchmarks/split_models.py models/sums-qwen3-fp8 --out benchmarks/results/split.jsonl

"tp" slices every expert, "ep" gives each rank some of them. Errors are those of the logits of 32 prompts of 12 tokens
against one GPU's in the same dtype, and that of one GPU in bfloat16 against itself in float16: ranks add up parts that
are rounded to the dtype. Tokens per second are those of greedy decoding in bfloat16 without CUDA graphs, of all rows
together, after a generation of the same size.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.distributed import DistributedConfig

import polymoe
from polymoe.errors import PolymoeError
from polymoe.problem.numerics import relative_error

ROOT = Path(__file__).resolve().parents[1]


def tokens_per_second(model: Any, rows: int, tokens: int, device: torch.device) -> float:
    """Generated tokens per second, of all rows together."""
    ids = torch.arange(12, device=device).expand(rows, -1) % 8 + 3
    seconds = 0.0
    for _ in range(2):  # the first one compiles
        start = time.perf_counter()
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens,
            do_sample=False,
        )  # fmt: skip
        assert out.shape[1] == 12 + tokens
        seconds = time.perf_counter() - start
    return round(rows * tokens / seconds, 1)


@torch.inference_mode()
def measure(path: Path, way: str, device: torch.device, tokens: int) -> dict[str, Any]:
    """Compare one model, split and whole."""
    size = dist.get_world_size()
    split = DistributedConfig(tp_size=size, ep_size=size if way == "ep" else 1)
    ids = (torch.arange(32 * 12, device=device) * 7 % 11 + 3).view(32, 12)
    found: dict[str, Any] = {}
    logits: dict[tuple[str, str], Tensor] = {}
    for dtype in ("bfloat16", "float16"):
        for name, how in (("whole", {}), ("split", {"distributed_config": split})):
            model, _ = polymoe.load(path, device=device, dtype=dtype, **how)
            logits[name, dtype] = model(input_ids=ids).logits.float()
            if dtype == "bfloat16":
                experts = [m.fused for m in model.modules() if getattr(m, "fused", None) is not None]
                found[name] = {
                    "tokens_per_second": {f"rows_{n}": tokens_per_second(model, n, tokens, device) for n in (1, 32)},
                    "experts_bytes": sum(fused.packed.nbytes for fused in experts),
                    "layout": experts[0].packed.layout,
                }
            del model
            gc.collect()
    errors = {
        dtype: relative_error(logits["split", dtype], logits["whole", dtype]) for dtype in ("bfloat16", "float16")
    }
    rounding = relative_error(logits["whole", "bfloat16"], logits["whole", "float16"])
    return {"error": errors, "bfloat16_from_float16": rounding, **found}


def main() -> None:
    """Entry point, of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--ways", nargs="+", default=["tp", "ep"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="append the records to this file")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    where = {
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device) if gpu else f"{os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
        "command": "torchrun --nproc-per-node 2 " + shlex.join(sys.argv),
    }
    for path in args.models:
        for way in args.ways:
            try:
                found = measure(path, way, device, args.tokens)
            except (PolymoeError, ValueError) as error:
                found = {"refused": f"{type(error).__name__}: {error}"}
            record = {"model": path.name, "way": way, **found, **where}
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
                if args.out is not None:
                    with args.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
