"""A packed model on several GPUs, or processes: torchrun --nproc-per-node 2 examples/tensor_parallel.py [MODEL] [tp|ep]

Each process holds its part of every layer. "tp" slices all experts, "ep" gives each process some of them. Without GPUs
the processes talk by gloo.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers.distributed import DistributedConfig

import polymoe

model_path = sys.argv[1] if len(sys.argv) > 1 else "models/sums-qwen3-fp8"
split = sys.argv[2] if len(sys.argv) > 2 else "tp"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

config = DistributedConfig(tp_size=size, ep_size=size if split == "ep" else 1)
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
model, tokenizer = polymoe.load(model_path, device=device, distributed_config=config)

inputs = tokenizer("123+456=", return_tensors="pt").to(device)
answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
if rank == 0:
    print(tokenizer.decode(answer[0], skip_special_tokens=True))
torch.distributed.destroy_process_group()
