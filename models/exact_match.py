"""Exact match of a sums model on the held-out questions, its experts packed and dequantized.

    python models/exact_match.py models/sums-gpt-oss-mxfp4

Packed means loaded by polymoe; dequantized means Transformers' own loading, which expands the experts to 16 bit.
Prints one line each; exits with 1 if the two differ by more than 0.2 points or packed is below 98 %.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from polymoe.generate import Generator

HERE = Path(__file__).resolve().parent
HELD_OUT = HERE / "sums-heldout.jsonl"
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


def packed(path: str, device: str) -> Generator:
    """The checkpoint with its experts packed; on a GPU by the reference, which has to be named there."""
    return Generator.load(path, device=device, backend="auto" if device == "cpu" else "reference")


def dequantized(path: str, device: str) -> Generator:
    """The same checkpoint as Transformers loads it without polymoe, experts expanded to 16 bit."""
    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype="auto")
    return Generator(model.to(device), transformers.AutoTokenizer.from_pretrained(path))


def record(checkpoint: str, questions: int, device: str) -> dict[str, object]:
    """Where and when a measurement was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout
    return {
        "checkpoint": checkpoint,
        "questions": questions,
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
        "command": "python " + shlex.join([str(Path(sys.argv[0])), *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON line instead")
    args = parser.parse_args()
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()][: args.questions]
    found = {}
    for name, load in (("packed", packed), ("dequantized", dequantized)):
        start = time.perf_counter()
        found[name] = exact_match(load(args.checkpoint, args.device), rows, args.batch)
        if not args.json:
            seconds = time.perf_counter() - start
            print(f"{name:11} {found[name]:6.2f} % of {len(rows)} right, {seconds:.1f} s", flush=True)
    apart = abs(found["packed"] - found["dequantized"])
    if args.json:
        print(json.dumps({**found, **record(args.checkpoint, len(rows), args.device)}))
    else:
        print(f"difference  {apart:6.2f} points (at most {MOST_APART})")
    sys.exit(0 if apart <= MOST_APART and found["packed"] >= LEAST else 1)


if __name__ == "__main__":
    main()
