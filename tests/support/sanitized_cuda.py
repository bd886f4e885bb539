"""Each CUDA kernel once, small, for compute-sanitizer: prints the relative errors against the reference.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/support/sanitized_cuda.py
compute-sanitizer --tool racecheck python tests/support/sanitized_cuda.py

With arguments, only the kernels of these formats, those that are configured for other GPUs ("targets") and experts in
host memory ("slots"). Without torch's caching allocator each tensor has bounds of its own, but no CUDA graph can be
captured: the same launches are made one by one then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.spec import W4A16_MMA, W4A16_MMA_TILED, W8A16_MMA, W8A16_MMA_TILED
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.slots import run_in_waves
from polymoe.machine import Machine
from polymoe.problem.activations import SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from support.cuda_calls import pack
from support.cuda_targets import TEST_TARGETS
from support.problems import problem_of, random_call, random_experts, with_input_scales


def main() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        print("no SM90 GPU: nothing to run")
        return
    worst, chosen = 0.0, sys.argv[1:]
    for format, mode, hidden, intermediate, tokens, top_k in (
        *((format, "16bit", 336, 272, 60, 2) for format in ("mxfp4", "nvfp4", "int4_g128", "bf16")),
        ("mxfp8", "16bit", 304, 272, 60, 2),
        *((format, "16bit", 592, 208, 5, 2) for format in ("mxfp4", "int4_g32")),
        ("mxfp4", "fp8_group128", 320, 192, 60, 2),
        ("mxfp4", "fp8_token", 320, 192, 600, 2),
        ("mxfp4", "fp8_static", 320, 192, 600, 2),
        ("int4_g128", "fp8_token", 320, 192, 600, 2),
        ("int4_g128_zp", "fp8_static", 320, 192, 600, 2),
        ("fp8_block128", "fp8_group128", 384, 256, 600, 2),
        ("fp8_block128", "fp8_group128", 384, 256, 600, 1),
        ("fp8_block128", "fp8_group128", 384, 256, 3, 2),
        ("fp8_channel", "fp8_token", 384, 256, 600, 2),
        ("fp8_channel", "fp8_static", 384, 256, 600, 2),
        ("fp8_tensor", "fp8_token", 384, 256, 3, 2),
    ):
        if chosen and format not in chosen:
            continue
        weights = random_experts(format, hidden=hidden, intermediate=intermediate, gated=format != "nvfp4", bias=True)
        if mode == "fp8_static":
            weights = with_input_scales(weights)
        problem = problem_of(weights, activations=mode)
        packed = pack(problem, weights, "cuda")
        x, routing = random_call(tokens, hidden, 5, top_k, torch.bfloat16)
        routing.topk_ids_TA[0, 0] = -1
        expected = run_experts(problem, weights, x, routing)
        for config in Cuda().tuning_configs(problem, Machine.of("cuda"), tokens):
            out = torch.empty_like(x, device="cuda")
            Cuda().bind(problem, packed).run(
                CallArguments(x.cuda(), *Routing(*(part.cuda() for part in routing)), out), config
            )
            error = relative_error(out.cpu(), expected)
            print(f"{format}, {mode}, {config}: {error:.2g}", flush=True)
            worst = max(worst, error)
    if not chosen or "targets" in chosen:
        worst = max(worst, *map(as_on, ("sm90-as-sm120", "sm90-as-sm86", "sm90-as-sm80")))
    if not chosen or "slots" in chosen:
        worst = max(worst, slots())
    sys.exit(not worst <= TOLERANCE)


def slots() -> float:
    """Experts in host memory: calls that fit the slots, calls in waves and prompts, the first two in a CUDA graph where
    one can be captured. The worst error, which is 0: results are bitwise a resident layer's."""
    weights = random_experts("mxfp4", experts=7, hidden=336, intermediate=208, bias=True)
    resident, *layers = (
        FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cuda", backend="cuda") for _ in range(3)
    )
    for offloaded in [OffloadedExperts(layer, 3) for layer in layers] * 2:
        for tokens in (1, 20):
            x, routing = random_call(tokens, 336, 7, 2, torch.bfloat16)
            x, ids, routing_weights = (t.cuda() for t in (x, *routing))
            y = torch.empty_like(x)
            again = _captured(offloaded, x, ids, routing_weights, y)
            for turn in range(3):
                ids.copy_((ids + turn) % 8)
                ids[ids == 7] = -1
                again()
                expected = resident(x, ids, routing_weights)
                if not torch.equal(y, expected) or not torch.equal(offloaded(x, ids, routing_weights), expected):
                    return float("inf")
            print(f"slots, {tokens} tokens: {offloaded.cache_stats()}", flush=True)
    return 0.0


def _captured(
    offloaded: OffloadedExperts, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, y_TH: Tensor
) -> Callable[[], object]:
    """What a CUDA graph of a call replays; without torch's caching allocator the same launches, not captured."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") == "0":
        offloaded(x_TH, ids_TA, weights_TA)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            offloaded(x_TH, ids_TA, weights_TA, out=y_TH)
        return graph.replay
    call, step = offloaded._rows.planned(CallArguments(x_TH, ids_TA, weights_TA, y_TH))
    return lambda: run_in_waves(offloaded._slots, step, offloaded.problem, call, offloaded.slots)


def as_on(name: str, formats: tuple[str, ...] = ("mxfp4", "nvfp4", "int4_g32", "mxfp8")) -> float:
    """The kernels as configured for another GPU, where ``scripts/build-kernels --tests`` made them: the worst error.

    On all SMs: a CTA's pipeline does not wrap then. Where it does, racecheck reports hazards that are none
    (docs/performance/cuda.md).
    """
    target, worst = TEST_TARGETS[name], 0.0
    for format in formats if target.folder.is_dir() else ():
        hidden = 240 if format == "mxfp8" else 592  # one stage, or two
        weights = random_experts(format, hidden=hidden, intermediate=208, gated=format != "nvfp4", bias=True)
        problem = problem_of(weights)
        x, routing = random_call(105, hidden, 5, 2, torch.bfloat16)
        routing.topk_ids_TA[:100, 0] = 1  # more rows than a work tile has
        expected = run_experts(problem, weights, x, routing)
        runner = CudaRunner(problem, pack(problem, weights, "cuda", target), target)
        few, many = (W8A16_MMA, W8A16_MMA_TILED) if format == "mxfp8" else (W4A16_MMA, W4A16_MMA_TILED)
        configs = [CudaConfig(few.name, rows, 64) for rows in few.tiles]
        configs += [CudaConfig(many.name, rows) for rows in many.tiles if many.name in target.families]
        for config in configs:
            out = torch.empty_like(x, device="cuda")
            runner.run(CallArguments(x.cuda(), *Routing(*(part.cuda() for part in routing)), out), config)
            error = relative_error(out.cpu(), expected)
            print(f"{format}, {target.name}, {config}: {error:.2g}", flush=True)
            worst = max(worst, error)
    return worst


if __name__ == "__main__":
    main()
