"""One rank of packed models that Transformers splits: split_packed.py OUT MODEL..., under torchrun, on CPUs.

Writes a line of JSON for each model and way to OUT: its error against the whole model, and this rank's experts, or why
it is refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from polymoe.engines.transformers import PackedExperts, load
from polymoe.problem.numerics import relative_error

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def compare(path: str, way: str) -> dict[str, Any]:
    """What this rank computes of a model that is split ``way``, and what it holds."""
    split = DistributedConfig(tp_size=SIZE, ep_size=SIZE if way == "ep" else 1)
    ids = torch.arange(3, 15).view(2, 6)
    try:
        model, _ = load(path, device="cpu", dtype=torch.float32, distributed_config=split)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    whole, _ = load(path, device="cpu", dtype=torch.float32)
    specs = [
        next(m.fused.problem.spec for m in one.modules() if isinstance(m, PackedExperts) and m.fused)
        for one in (model, whole)
    ]
    part = [specs[0].local_bytes, specs[1].local_bytes]
    with torch.inference_mode():
        return {"error": relative_error(model(ids).logits, whole(ids).logits), "bytes": part}


def main(out: Path, paths: list[str]) -> None:
    """Compare all, both ways."""
    torch.distributed.init_process_group("gloo")
    found = {f"{Path(path).name} {way}": compare(path, way) for path in paths for way in ("tp", "ep")}
    (out / f"rank-{RANK}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
