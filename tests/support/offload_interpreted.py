"""Compares rows in slots with a whole layer, bitwise, on the Triton backend in Triton's interpreter on the CPU. It
needs its own process, because the interpreter is chosen when kernels are defined. One JSON line for each case."""

from __future__ import annotations

import json

import torch

from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.layer.offload import LeastRecentlyUsed
from polymoe.layouts import LAYOUTS, Packed
from polymoe.problem.call import CallArguments
from polymoe.problem.routing import Routing
from support.problems import GPT_OSS, problem_of, random_call, random_experts

EXPERTS, SLOTS = 8, 4


def main() -> None:
    tile = Tile(32, 64)
    config = TritonConfig(16, tile, tile)
    for format in ("mxfp4", "nvfp4"):
        weights = random_experts(format, experts=EXPERTS, bias=True)
        problem = problem_of(weights, GPT_OSS)
        packed = LAYOUTS["natural"].pack(weights, torch.device("cpu"))
        rows = {
            name: torch.full_like(t[:SLOTS].view(torch.uint8), 255).view(t.dtype) for name, t in packed.tensors.items()
        }
        slots, cache = Packed(packed.layout, packed.spec, rows), LeastRecentlyUsed(SLOTS)
        resident, offloaded = Triton().bind(problem, packed), Triton().bind(problem, slots)
        for seed in range(6):
            x, routing = random_call(3, 64, EXPERTS, seed=seed)
            ids = torch.randperm(EXPERTS)[:SLOTS][routing.topk_ids_TA % SLOTS]
            for expert, slot in cache.place(ids.unique().tolist()):
                for name, tensor in rows.items():
                    tensor[slot] = packed.tensors[name][expert]
            places = torch.tensor([cache.slot_of.get(e, -1) for e in range(EXPERTS)])
            expected, got = torch.empty_like(x), torch.empty_like(x)
            call = Routing(ids, routing.topk_weights_TA)
            resident.run(CallArguments(x, *call, expected), config)
            offloaded.run(CallArguments(x, *call, got, expert_map=places), config)
            print(json.dumps({"format": format, "equal": torch.equal(expected, got)}), flush=True)


if __name__ == "__main__":
    main()
