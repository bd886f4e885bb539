"""Which experts should stay on the GPU: policies compared on routing of the trained models, and on synthetic routing.

    python benchmarks/slot_policies.py --out benchmarks/results/slot-policies.jsonl

Each trained model answers questions that it was not trained on, one after the other. Synthetic routing has the sizes of
gpt-oss-120b: experts of a token are drawn by a Zipf law, whose ranks differ between layers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from polymoe.bench.records import source, utc_now
from polymoe.bench.slot_policies import replays, slots_of_layers
from polymoe.common.atomic import append_line
from polymoe.engines.transformers.generator import Generator
from polymoe.engines.transformers.routing_recorder import recorded_routing
from polymoe.layer.routing_trace import RoutingTrace, TracedLayer

MODELS = Path(__file__).resolve().parents[1] / "models"
SHARES = (0.125, 0.25, 0.5, 0.75)
LAYERS, EXPERTS, TOP_K, EXPERT_BYTES, TOKENS = 12, 128, 4, 13_200_000, 2000
SYNTHETIC = {
    "zipf:1": {},
    "zipf:1, new ranks every 128 tokens": {"ranks_last": 128},
    "zipf:1, 45 % of choices repeated": {"repeated": 0.45},
}


def recorded(checkpoint: Path, questions: int) -> RoutingTrace:
    """Routing of a trained model that answers questions."""
    lines = (MODELS / "sums-heldout.jsonl").read_text(encoding="utf-8").splitlines()[:questions]
    generator = Generator.load(str(checkpoint), device="cpu")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "routing"
        with recorded_routing(generator.model, path):
            for line in lines:
                generator.answer([json.loads(line)["prompt"]], max_tokens=8)
        return RoutingTrace.load(path)


def synthetic(*, ranks_last: int = TOKENS, repeated: float = 0.0) -> RoutingTrace:
    """Routing of one token after the other, through all layers each.

    Args:
        ranks_last: tokens after which other experts are popular.
        repeated: share of a token's experts that are kept from the token before.
    """
    g = torch.Generator().manual_seed(0)

    def ids() -> Iterator[Tensor]:
        log_p = last = torch.empty(0)
        for token in range(TOKENS):
            if token % ranks_last == 0:
                log_p = -torch.stack([torch.randperm(EXPERTS, generator=g) + 1 for _ in range(LAYERS)]).log()
            # The k largest of log p plus Gumbel noise are a draw without replacement in proportion to p.
            keys = log_p - torch.rand(LAYERS, EXPERTS, generator=g).clamp_(1e-30, 1 - 1e-7).log_().neg_().log_()
            if token:
                kept = torch.rand(LAYERS, TOP_K, generator=g) < repeated
                keys.scatter_add_(1, last, torch.where(kept, 1e3, 0.0))
            last = keys.topk(TOP_K).indices
            yield last

    layers = tuple(TracedLayer(f"layer {n}", EXPERTS, EXPERT_BYTES, TOP_K) for n in range(LAYERS))
    return RoutingTrace(
        "synthetic",
        layers,
        torch.arange(LAYERS, dtype=torch.int16).repeat(TOKENS),
        torch.ones(LAYERS * TOKENS, dtype=torch.int32),
        torch.stack(list(ids())).flatten().to(torch.int16),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100, help="of each model")
    parser.add_argument("--out", type=Path, required=True, help="append records to this file")
    args = parser.parse_args()
    stamp = {"commit": source(), "command": shlex.join(["python", *sys.argv])}
    configs = [path for path in sorted(MODELS.glob("sums-*/config.json")) if "quantization_config" in path.read_text()]
    names = [path.parent.name for path in configs]
    for name in (*names, *SYNTHETIC):
        trace = recorded(MODELS / name, args.questions) if name in names else synthetic(**SYNTHETIC[name])
        calls, first = list(trace.calls()), trace.layers[0]
        sizes = {"layers": len(trace.layers), "experts": first.experts, "top_k": first.top_k}
        seen = set()
        for share in SHARES:
            slots = slots_of_layers(share, trace)
            if slots in seen:
                continue
            seen.add(slots)
            counted = sum(len(call.needed) <= slots[call.layer] for call in calls)
            about = {"trace": name, **sizes, "slots": slots[0], "calls": len(calls), "calls_counted": counted}
            for result in replays(calls, trace, slots):
                found = {**asdict(result), "hit_rate": None if result.hit_rate is None else round(result.hit_rate, 4)}
                append_line(args.out, json.dumps({**about, **found, "date": utc_now(), **stamp}))
        print(name, len(calls), "calls", flush=True)


if __name__ == "__main__":
    main()
