"""Decoding speed of a sums model on this machine: by polymoe, and dequantized in Transformers, one beside the other.

    python models/speed.py models/sums-gpt-oss-mxfp4

The two alternate, one answer of the same length at a time, so that whatever else the machine does slows both. The
fastest turn of each counts, by the clock and by the processor time of all cores.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from exact_match import dequantized, packed

from polymoe.engines.transformers.generator import Generator


def turn(generator: Generator, tokens: int) -> tuple[float, float]:
    """Write an answer of so many tokens; return tokens per second, and tokens per second of processor time."""
    inputs = generator.encode(["123+456="], chat=False)
    wall, processor = time.perf_counter(), time.process_time()
    generator.generate(inputs, max_tokens=tokens, min_new_tokens=tokens)
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print("loading the model twice", flush=True)
    ours = packed(args.checkpoint, args.device)
    theirs, by = dequantized(args.checkpoint, ours)
    contenders = {
        f"polymoe, backend {', '.join(ours.speed()['backends'])}": ours,
        f"experts dequantized ({by}), without polymoe": theirs,
    }
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(args.turns + 1):
        for name, generator in contenders.items():
            turns[name].append(turn(generator, args.tokens))
        print(f"turn {number} of {args.turns}" if number else "warmed up", flush=True)
    best = {name: [max(column) for column in zip(*found[1:], strict=True)] for name, found in turns.items()}
    for name, (wall, processor) in best.items():
        print(f"{name}: {wall:.1f} tokens/s, {processor:.1f} per second of processor time")
    (wall, processor), (other_wall, other_processor) = best.values()
    print(f"ratio: {wall / other_wall:.2f} by the clock, {processor / other_processor:.2f} by processor time")


if __name__ == "__main__":
    main()
