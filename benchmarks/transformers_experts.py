"""Time the MXFP4 experts that Transformers keeps packed itself: one layer of gpt-oss, beside polymoe's records.

    LOCAL_KERNELS=kernels-community/gpt-oss-triton-kernels=DIR \\
        python benchmarks/transformers_experts.py --out benchmarks/results/peers-h200.jsonl

Weights, calls and timing are those of `polymoe bench --case gpt-oss-120b`. A call is what Transformers' module runs for
a layer after the router's matrix: the choice of experts from logits, and both products. Results are compared with the
reference first. `LOCAL_KERNELS` is a variable of the package `kernels`: where the kernels are that Transformers would
fetch from the Hub.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations import mxfp4
from transformers.integrations.hub_kernels import get_kernel

from polymoe.bench.baseline import BASELINE_TOLERANCE
from polymoe.bench.cases import Workload, case_named
from polymoe.bench.measure import draw_calls, reference_results
from polymoe.bench.records import utc_now
from polymoe.bench.routings import RoutingDistribution
from polymoe.bench.timing import TimedCalls
from polymoe.common.atomic import append_line
from polymoe.machine import Machine
from polymoe.problem.activation_quantization import UNQUANTIZED
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing

CASE, TOKENS = "gpt-oss-120b", "1,4,16,64,256,1024,4096"


def experts_of(workload: Workload, device: torch.device) -> Any:
    """Transformers' module with the weights of a workload."""
    spec, hub = workload.problem.spec, mxfp4.triton_kernels_hub
    config: Any = SimpleNamespace(
        num_local_experts=spec.experts, intermediate_size=spec.intermediate, hidden_size=spec.hidden, swiglu_limit=7.0
    )
    with torch.device("meta"):
        module = mxfp4.Mxfp4GptOssExperts(config)
    parts: dict[str, list[Tensor]] = {}
    expert: Any
    for expert in workload.weights:
        for name, halves in (("gate_up_proj", (expert.gate, expert.up)), ("down_proj", (expert.down,))):
            for part, group in (("blocks", 16), ("scales", 1)):
                found = [m.codes if part == "blocks" else m.scales.view(torch.uint8) for m in halves]
                joined = torch.stack(found, 1).flatten(0, 1)  # rows of gate and up alternate
                parts.setdefault(f"{name}_{part}", []).append(joined.unflatten(-1, (-1, group)))
        biases = torch.stack([expert.gate_bias, expert.up_bias], -1).flatten()
        parts.setdefault("gate_up_proj_bias", []).append(biases.float())
        parts.setdefault("down_proj_bias", []).append(expert.down_bias.float())
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (torch.stack(parts[f"{name}_{part}"]) for part in ("blocks", "scales"))
        mxfp4.swizzle_mxfp4_convertops(blocks, scales.squeeze(-1), module, name, device, hub)
        setattr(module, f"{name}_bias", torch.nn.Parameter(torch.stack(parts[f"{name}_bias"]), requires_grad=False))
    return module


def run(module: Any, x_TH: Tensor, logits_TE: Tensor, top_k: int) -> Tensor:
    """What Transformers' packed MLP of gpt-oss does after the router's matrix."""
    data, gather, scatter = mxfp4.triton_kernels_hub.routing.routing(logits_TE, top_k)
    forward = getattr(module, "forward_routed", module.forward)  # of Transformers 5.23, of older ones
    return forward(x_TH, data, gather, scatter)


def logits_of(routing: Routing, experts: int) -> Tensor:
    """bfloat16 logits [T, E] from which the router chooses these experts with these weights, but for rounding."""
    logits = routing.topk_weights_TA.new_full((len(routing.topk_ids_TA), experts), -20.0)
    return logits.scatter_(1, routing.topk_ids_TA, routing.topk_weights_TA.log()).bfloat16()


def main() -> None:
    """Print a line for each number of tokens, and append a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--kernels", default="gpt-oss-triton-kernels", help="what LOCAL_KERNELS names, for the records")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    mxfp4.triton_kernels_hub = get_kernel("kernels-community/gpt-oss-triton-kernels", version=1)
    workload = Workload.of_case(case_named(CASE), device)
    module, machine = experts_of(workload, device), Machine.of("cuda")
    spec, top_k = workload.problem.spec, workload.problem.top_k
    for tokens in map(int, args.tokens.split(",")):
        calls = draw_calls(workload.problem, RoutingDistribution("uniform"), device, tokens)
        [expected] = reference_results(workload, UNQUANTIZED, calls[:1])
        timed: list[Any] = [partial(run, module, x, logits_of(routing, spec.experts), top_k) for x, routing in calls]
        error = relative_error(timed[0](), expected)
        if not error <= BASELINE_TOLERANCE:
            raise SystemExit(f"{tokens} tokens: error {error:.2g}, at most {BASELINE_TOLERANCE:g}; not timed")
        timing = TimedCalls(timed, device, graph=True).time(rest_seconds=0.5)
        print(f"{tokens} tokens: {timing.median_us:.2f} us, error {error:.2g}", flush=True)
        record = {
            "case": CASE, "format": spec.format, "activations": "16bit", "tokens": tokens, "routing": "uniform",
            "peer": "Transformers", "version": f"{transformers.__version__}, {args.kernels}",
            "median_us": round(timing.median_us, 2), "device": machine.device.name, "torch": torch.__version__,
            "triton": machine.packages.get("triton"), "date": utc_now()[:10],
        }  # fmt: skip
        if args.out is not None:
            append_line(args.out, json.dumps(record))


if __name__ == "__main__":
    main()
