"""Exact match of a sums model on the held-out questions, its experts packed and dequantized.

    python models/exact_match.py models/sums-gpt-oss-mxfp4

Packed means loaded by polymoe; dequantized means Transformers' own loading, which expands the experts to 16 bit.
Prints one line each; exits with 1 if the two differ by more than 0.2 points or packed is below 98 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from polymoe.generate import Generator

HELD_OUT = Path(__file__).resolve().parent / "sums-heldout.jsonl"
MOST_APART = 0.2  # points
LEAST = 98.0  # percent


def exact_match(generator: Generator, rows: list[dict[str, str]], batch: int) -> float:
    """Percent of the questions whose whole answer is right."""
    right = 0
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        answers = generator.answer([row["prompt"] for row in some], max_tokens=8)
        right += sum(answer.text == row["answer"] for answer, row in zip(answers, some, strict=True))
    return 100 * right / len(rows)


def dequantized(path: str) -> Generator:
    """The same checkpoint as Transformers loads it without polymoe, experts expanded to 16 bit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    return Generator(
        AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype="auto"),
        AutoTokenizer.from_pretrained(path),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args()
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()][: args.questions]
    found = {}
    for name, load in (("packed", Generator.load), ("dequantized", dequantized)):
        start = time.perf_counter()
        found[name] = exact_match(load(args.checkpoint), rows, args.batch)
        if not args.json:
            print(f"{name:11} {found[name]:6.2f} % of {len(rows)} right, {time.perf_counter() - start:.1f} s", flush=True)
    apart = abs(found["packed"] - found["dequantized"])
    good = apart <= MOST_APART and found["packed"] >= LEAST
    if args.json:
        print(json.dumps({**found, "questions": len(rows), "difference": apart, "ok": good}))
    else:
        print(f"difference  {apart:6.2f} points (at most {MOST_APART})")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
