"""Compares rows in slots with a whole layer, bitwise, on the Triton backend in Triton's interpreter on the CPU: calls
of at most as many ids as slots, and larger ones in waves. It needs its own process, because the interpreter is chosen
when kernels are defined. One JSON line for each case."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.layer.runtime import BoundStep
from polymoe.layer.slots import CpuSlots, run_in_waves
from polymoe.layouts import LAYOUTS, Packed
from polymoe.problem.call import CallArguments
from support.problems import GPT_OSS, problem_of, random_call, random_experts

EXPERTS, SLOTS, TOP_K = 8, 4, 2


def main() -> None:
    tile = Tile(32, 64)
    few = (2, 1, 9)
    for format, config, weight_on, calls in (
        ("mxfp4", TritonConfig(16, tile, tile), "output", (2, 2, 9, 1, 30, 9)),
        ("nvfp4", TritonConfig(16, tile, replace(tile, split_k=2)), "output", few),
        ("mxfp4", TritonConfig(16, tile, tile), "input", few),
    ):
        weights = random_experts(format, experts=EXPERTS, bias=True)
        problem = problem_of(weights, GPT_OSS, weight_on=weight_on)
        packed = LAYOUTS["natural"].pack(weights, torch.device("cpu"))
        rows = {
            name: torch.full_like(t[:SLOTS].view(torch.uint8), 255).view(t.dtype) for name, t in packed.tensors.items()
        }
        slots = CpuSlots(problem.spec, list(rows.values()), list(packed.tensors.values()))
        resident = Triton().bind(problem, packed)
        offloaded = Triton().bind(problem, Packed(packed.layout, packed.spec, rows))
        for seed, tokens in enumerate(calls):
            x, routing = random_call(tokens, 64, EXPERTS, TOP_K, seed=seed)
            routing.topk_ids_TA[0, 0] = -1 if seed % 2 else EXPERTS
            expected, got = torch.empty_like(x), torch.empty_like(x)
            resident.run(CallArguments(x, *routing, expected), config)
            call = CallArguments(x, *routing, got)
            if tokens * TOP_K > SLOTS:
                run_in_waves(slots, BoundStep(None, "triton", offloaded, config), problem, call, SLOTS)
            else:
                offloaded.run(call._replace(topk_ids_TA=slots.place(routing.topk_ids_TA)), config)
            equal = torch.equal(expected, got) and bool(expected.isfinite().all())
            print(json.dumps({"format": format, "tokens": tokens, "equal": equal}), flush=True)


if __name__ == "__main__":
    main()
