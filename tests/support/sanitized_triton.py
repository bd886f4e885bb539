"""Run each Triton kernel once, on small inputs, under compute-sanitizer, and print the errors against the reference.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/support/sanitized_triton.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from polymoe.backends.reference import run_experts
from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.layouts import LAYOUTS
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from support.problems import problem_of, random_call, random_experts

CONFIGS = {
    "decode": (3, TritonConfig(8, Tile(64, 128, split_k=2), Tile(32, 64, 2), pdl=True)),
    "prefill": (90, TritonConfig(64, Tile(64, 64), Tile(128, 64, 8), tail_block_m=16, pdl=True)),
    "several N blocks": (40, TritonConfig(16, Tile(64, 128), Tile(64, 128, n_blocks_per_cta=2), pdl=True)),
}


def main() -> None:
    worst = 0.0
    for format, mode in (("mxfp4", "16bit"), ("fp8_block128", "fp8_group128"), ("bf16", "16bit")):
        weights = random_experts(format, hidden=256, intermediate=192, bias=True)
        problem = problem_of(weights, activations=mode)
        packed = LAYOUTS["natural"].pack(weights, torch.device("cuda"))
        for name, (tokens, config) in CONFIGS.items():
            x, routing = random_call(tokens, 256, 5, dtype=torch.bfloat16)
            routing.topk_ids_TA[0, 0] = -1
            out = torch.empty_like(x, device="cuda")
            Triton().bind(problem, packed).run(
                CallArguments(x.cuda(), *Routing(*(part.cuda() for part in routing)), out), config
            )
            error = relative_error(out.cpu(), run_experts(problem, weights, x, routing))
            print(f"{format}, {name}: {error:.2g}", flush=True)
            worst = max(worst, error)
    sys.exit(not worst <= TOLERANCE)


if __name__ == "__main__":
    main()
