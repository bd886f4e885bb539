"""The difference of two runs of lm-eval, paired by question, with its 95 % interval.

    python examples/lm_eval/compare.py packed dequantized

Each is what lm_eval writes with ``--log_samples --output_path``: a file of samples, or a directory in which several
files are repeats of one run. The formulas are those of E. Miller, "Adding Error Bars to Evals", 2024,
https://arxiv.org/abs/2411.00640.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev


def means(path: Path, metric: str, filter: str) -> dict[str, float]:
    """The mean of a metric over the repeats of each question."""
    values = defaultdict(list)
    for file in sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["filter"] == filter and metric in row:
                values[f"{row['doc_id']} {row['doc_hash']}"].append(float(row[metric]))
    if not values:
        sys.exit(f"error: {path} has no samples with metric {metric} and filter {filter}")
    return {question: fmean(several) for question, several in values.items()}


def interval(differences: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of at least 30 differences, each from -1 to 1."""
    mean, count = fmean(differences), len(differences)
    error = stdev(differences) / math.sqrt(count)
    if error:
        return mean - 1.96 * error, mean + 1.96 * error
    unseen = 1 - 0.05 ** (1 / count)  # the share of questions that may differ from these: about 3 in count
    return mean - unseen * (mean + 1), mean + unseen * (1 - mean)


def main() -> None:
    """Print the mean of each run, and the difference A - B."""
    parser = argparse.ArgumentParser(description="Compare two runs of lm-eval, paired by question.")
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--metric", default="exact_match")
    parser.add_argument("--filter", default="none", help="such as strict-match, for tasks that have several")
    given = parser.parse_args()
    a, b = (means(path, given.metric, given.filter) for path in (given.a, given.b))
    both = sorted(a.keys() & b.keys())
    if len(both) < 30:
        sys.exit(f"error: expected at least 30 questions that both runs answered, got {len(both)}")
    differences = [a[question] - b[question] for question in both]
    for name, run in (("A", a), ("B", b)):
        values = [run[question] for question in both]
        print(f"{name} {100 * fmean(values):7.2f} % ± {100 * stdev(values) / math.sqrt(len(both)):.2f}")
    low, high = interval(differences)
    print(f"A - B {100 * fmean(differences):+.2f} points, 95 % interval {100 * low:+.2f} to {100 * high:+.2f}")
    print(f"{len(both)} questions; {len(a.keys() ^ b.keys())} were answered in one run only and are left out")


if __name__ == "__main__":
    main()
