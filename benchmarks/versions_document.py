"""Versions of other packages that ran, from the records: constraints for pip, the table of docs/install.md, and the
file that ``polymoe doctor`` compares with (written by benchmarks/write_docs.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polymoe.backends.packages import release

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "vllm", "sglang", "flashinfer-python", "humming-kernels")
CONSTRAINTS = {
    "gpu": ("torch", "triton", "transformers"),
    "vllm": ("vllm", "torch", "triton"),
    "sglang": ("sglang", "torch", "triton"),
}
"""Files of constraints/ and the packages that each fixes."""
_OF_PEERS = {"flashinfer-h200.jsonl": "flashinfer-python", "humming-h200.jsonl": "humming-kernels"}
"""Files whose records have the version of one library."""

Ran = dict[str, dict[str, list[str]]]


def ran(results: Path = ROOT / "benchmarks" / "results") -> Ran:
    """Versions of each package that the records name, in ascending order, by where they ran: "GPU" or "CPU"."""
    found: dict[str, dict[str, set[str]]] = {name: {"GPU": set(), "CPU": set()} for name in PACKAGES}
    for file in sorted(results.glob("*.jsonl")):
        for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            where = "CPU" if str(record.get("torch", "")).endswith("+cpu") else "GPU"
            for name, version in _versions(file.name, record):
                found[name][where].add(version.partition("+")[0])
    return {name: {at: sorted(of, key=release) for at, of in places.items()} for name, places in found.items()}


def _versions(file: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        if isinstance(record.get(name), str):
            yield name, record[name]
    if file in _OF_PEERS and record.get("version"):
        yield _OF_PEERS[file], record["version"]


def constraints(found: Ran, name: str) -> str:
    """A file for ``pip install -c``: the newest versions that ran on a GPU."""
    lines = [f"{package}=={found[package]['GPU'][-1]}" for package in CONSTRAINTS[name]]
    head = "# What ran on a GPU, from benchmarks/results; written by benchmarks/write_docs.py."
    return "\n".join([head, *lines, ""])


def table(found: Ran) -> str:
    """The matrix of docs/install.md."""
    lines = ["| package | ran on a GPU | ran on a CPU |", "| --- | --- | --- |"]
    for name, places in found.items():
        cells = (", ".join(places[where]) or "no record" for where in ("GPU", "CPU"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def packaged(found: Ran) -> str:
    """The file of the package that ``polymoe doctor`` reads."""
    return json.dumps(found, indent=1) + "\n"
