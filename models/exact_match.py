"""Exact match of the sums models on the held-out questions, their experts packed and dequantized.

    python models/exact_match.py models/sums-gpt-oss-mxfp4      # several, or none for all

Packed means loaded by polymoe. Dequantized means Transformers' own path where it has one that works ("transformers"),
else Transformers' model filled with weights that polymoe has dequantized ("filled"); see dequantized.py. Prints a line
each; exits with 1 if the two differ by more than 0.3 points or packed is below 97 % for any.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from dequantized import filled, own

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.config import parse_quantization
from polymoe.checkpoint.quantized import QUANTIZED_FORMATS
from polymoe.cli.progress import Progress
from polymoe.engines.transformers.generator import Generator

HERE = Path(__file__).resolve().parent
HELD_OUT = HERE / "sums-heldout.jsonl"
MOST_APART = 0.3  # points
LEAST = 97.0  # percent
LEAST_QUANTIZED = 99.0  # percent, of experts that are quantized while loading


def exact_match(
    generator: Generator, rows: list[dict[str, str]], batch: int, said: Callable[[str], None] = lambda text: None
) -> float:
    """Return the percentage of questions that are answered exactly; ``said`` is told after each batch.

    Questions of one length share a batch, so that none is padded: DeepSeek-V4 compresses windows of tokens, which
    padding would move.
    """
    right = answered = 0
    for _, group in itertools.groupby(sorted(rows, key=_length), _length):
        some = list(group)
        for start in range(0, len(some), batch):
            asked = some[start : start + batch]
            answers = generator.answer([row["prompt"] for row in asked], max_tokens=8)
            right += sum(answer.text == row["answer"] for answer, row in zip(answers, asked, strict=True))
            answered += len(asked)
            said(f"{right} of {answered} right")
    return 100 * right / len(rows)


def _length(row: dict[str, str]) -> int:
    return len(row["prompt"])


def packed(path: Path, device: str) -> Generator:
    """Return the checkpoint with packed experts. On a GPU the reference backend is named explicitly."""
    return Generator.load(str(path), device=device, backend="auto" if device == "cpu" else "reference")


def dequantized(path: Path, like: Generator) -> tuple[Generator, str]:
    """The same checkpoint with every weight in the dtype of ``like``, and whose work that is."""
    dtype, device = like.model.dtype, like.model.device
    model, by = own(path, dtype), "transformers"
    if model is None:
        model, by = filled(path, dtype), "filled"
    return Generator(model.to(device), like.tokenizer), by


def formats(
    path: Path, rows: list[dict[str, str]], batch: int, device: str, said: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Exact match of a checkpoint in 16 bit, as it is ("bf16") and with experts in each format."""
    found = {}
    for experts in ("bf16", *QUANTIZED_FORMATS):
        generator = Generator.load(str(path), device=device, experts=None if experts == "bf16" else experts)
        found[experts] = exact_match(generator, rows, batch, lambda text, name=experts: said(f"{name}, {text}"))
    return found


def is_quantized(path: Path) -> bool:
    """Whether a checkpoint's config says that its experts are quantized."""
    return parse_quantization(json.loads((path / "config.json").read_text())).quantized


def facts(path: Path) -> dict[str, object]:
    """Return facts about the checkpoint."""
    with Checkpoint.open(path) as checkpoint:
        specs = [checkpoint.spec(layer) for layer in checkpoint.layers]
        stored = sum(spec.local_experts * spec.expert_bytes for spec in specs)
        return {
            "family": checkpoint.model_type,
            "format": ", ".join(sorted({spec.format for spec in specs})),
            "experts_bytes": stored,
            "experts_bytes_16bit": sum(spec.dequantized_bytes for spec in specs),
        }


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
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="JSON lines instead")
    args = parser.parse_args()
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()][: args.questions]
    good = True
    for path in args.checkpoints or sorted(file.parent for file in HERE.glob("sums-*/config.json")):
        start = time.perf_counter()
        if not is_quantized(path):
            with Progress(path.name) as progress:
                right = formats(path, rows, args.batch, args.device, progress.update)
            good &= min(right.values()) >= LEAST_QUANTIZED
            if args.json:
                where = record(os.path.relpath(path), len(rows), args.device)
                print(json.dumps({"right": right, **facts(path), **where}), flush=True)
            else:
                text = ", ".join(f"{name} {percent:.2f} %" for name, percent in right.items())
                print(f"{path.name}: {text} of {len(rows)} right (at least {LEAST_QUANTIZED:g} %)", flush=True)
            continue
        with Progress(path.name) as progress:
            progress.update("loading")
            generator = packed(path, args.device)
            percent = exact_match(generator, rows, args.batch, lambda text: progress.update(f"packed, {text}"))
            progress.update("loading dequantized")
            other, by = dequantized(path, generator)
            expected = exact_match(other, rows, args.batch, lambda text: progress.update(f"dequantized, {text}"))
        apart = abs(percent - expected)
        good &= apart <= MOST_APART and percent >= LEAST
        if args.json:
            found = {"packed": percent, "dequantized": expected, "dequantized_by": by}
            where = record(os.path.relpath(path), len(rows), args.device)
            print(json.dumps({**found, **facts(path), **where}), flush=True)
        else:
            print(
                f"{path.name}: packed {percent:.2f} %, dequantized ({by}) {expected:.2f} % of {len(rows)} right, "
                f"{apart:.2f} points apart (at most {MOST_APART}), {time.perf_counter() - start:.1f} s",
                flush=True,
            )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
