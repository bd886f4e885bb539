"""One rank of a model that Transformers splits: split_model.py MODEL tp|ep OUT, in the environment of torchrun.

Writes logits with one plan on all ranks, and what it says where rank 1 names a backend and rank 0 does not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from polymoe.engines.transformers import load
from polymoe.errors import PlanError


def main(path: str, split: str, out: Path) -> None:
    rank = os.environ["RANK"]
    sizes: Any = {"tp_size": 2, **({"ep_size": 2} if split == "ep" else {})}
    ids = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        model, _ = load(path, device="cpu", distributed_config=DistributedConfig(**sizes))
        torch.save(model(ids).logits, out / f"logits-{rank}")
        backend = "reference" if rank == "1" else "auto"
        try:
            model, _ = load(path, device="cpu", backend=backend, distributed_config=DistributedConfig(**sizes))
            model(ids)
            said = "nothing"
        except PlanError as error:
            said = str(error)
    (out / f"said-{rank}").write_text(said)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
