"""src/polymoe/planning/proof.jsonl: how far each backend is proven on which GPU model, from benchmarks/results/.

``measured`` follows from the records of ``polymoe bench``, which times nothing whose results are wrong. ``run`` follows
from ``run-*.jsonl``, which ``PROOF=benchmarks/results/run-h200.jsonl scripts/test-gpu`` writes on an H200, and from the
lines that ``polymoe verify --out`` writes.

python benchmarks/write_proof.py            # rewrite it
python benchmarks/write_proof.py --add F    # first add the lines of a report from the issue form to benchmarks/results/
python benchmarks/write_proof.py --check    # exit with 1 if it is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from pathlib import Path

from polymoe.backends import BACKENDS
from polymoe.bench.cases import CASES
from polymoe.bench.records import Record, read, read_lines
from polymoe.common.atomic import append_line, replace_file
from polymoe.common.json_input import parse_json, read_fields
from polymoe.machine import DEVICES, Machine
from polymoe.planning import table_files
from polymoe.planning.measured import Table
from polymoe.planning.predictor import Predictor
from polymoe.planning.proof import Proof, RunLine
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.verdict import Rejected

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "src/polymoe/planning/proof.jsonl"
CELL = ("backend", "family", "format", "activations", "device")


def proofs(results: Path = ROOT / "benchmarks/results") -> list[Proof]:
    """One row a cell: the newest measurement, or else the newest run, sorted by cell."""
    best: dict[tuple[str, ...], Proof] = {}
    for row in (*_run(results), *_measured(results)):
        rank = (row.status == "measured", row.date)
        old = best.get(row.cell)
        if old is None or rank >= (old.status == "measured", old.date):
            best[row.cell] = row
    return [best[cell] for cell in sorted(best)]


def _measured(results: Path) -> Iterator[Proof]:
    """Of each record: what it measured, and the reference, which ran on the same GPU and agreed."""
    for path in sorted(p for name in BACKENDS for p in results.glob(f"{name}-*.jsonl")):
        for record in read(path):
            family = _family(record) if record.backend in BACKENDS else None
            if family is None:
                continue
            measured = Proof(
                backend=record.backend,
                family=family,
                format=record.format,
                activations=record.activations,
                device=record.device,
                status="measured",
                commit=record.commit,
                date=record.date,
                source=path.name,
            )
            yield measured
            compared = str(ActivationQuantization.of(record.activations).promoted)
            yield replace(measured, backend="reference", family="", activations=compared, status="run")


def _family(record: Record) -> str | None:
    """The kernels that a record is of. Records from before there was such a field: those that the plan has for the
    case and its tokens. None where that cannot be said."""
    if record.family is not None:
        return record.family
    if record.case not in CASES or record.device not in DEVICES:
        return None
    problem, backend = CASES[record.case].problem(record.format, record.activations), BACKENDS[record.backend]
    machine = Machine(DEVICES[record.device], {"triton": record.triton} if record.triton else {})
    if isinstance(backend.check(problem, machine), Rejected):
        return None
    shipped = resources.files("polymoe.planning") / "tables" / table_files.file_name(record.device)
    predictor = Predictor.of(backend, problem, machine, Table((tuple(table_files.read(shipped)),)))
    return predictor.configure(record.tokens).kernel_family


def _run(results: Path) -> Iterator[Proof]:
    """Cells that some test proved and no test refuted."""
    for path in sorted(results.glob("run-*.jsonl")):
        lines = read_lines(path, partial(read_fields, RunLine), "a line that scripts/test-gpu wrote")
        failed = {run.cell for run in lines if not run.passed}
        for run in lines:
            if run.cell not in failed and run.backend in BACKENDS:
                names = dict(zip(CELL, run.cell, strict=True))
                yield Proof(**names, status="run", commit=run.commit, date=run.date, source=path.name)


def add(report: Path, results: Path = ROOT / "benchmarks/results") -> list[str]:
    """Append the lines of a pasted block to the files of their GPU and kind, and return the names of these files.

    Lines that a file already has are left out. Nothing is written if a line is neither a record nor what ran.
    """
    found: dict[Path, list[str]] = {}
    for line in report.read_text(encoding="utf-8").splitlines():
        if not line.startswith("{"):
            continue
        values = parse_json(line.encode())
        kind = RunLine if isinstance(values, dict) and "passed" in values else Record
        row = read_fields(kind, values)
        if row.device not in DEVICES or DEVICES[row.device].kind == "cpu":
            sys.exit(f"{report}: {row.device} is no GPU of DEVICES in machine.py: add it there first")
        if row.backend not in BACKENDS:  # a baseline
            continue
        name = f"{'run' if kind is RunLine else row.backend}-{row.device}.jsonl"
        found.setdefault(results / name, []).append(json.dumps(values))
    for path, lines in found.items():
        there = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in dict.fromkeys(lines):
            if line not in there:
                append_line(path, line)
    return [path.name for path in found]


def text(rows: list[Proof]) -> str:
    """The file's content."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is not current")
    parser.add_argument("--add", type=Path, metavar="FILE", help="a report whose lines are added first")
    given = parser.parse_args()
    if given.add is not None:
        print("\n".join(add(given.add)))
    check, made = given.check, text(proofs())
    if not check:
        replace_file(TARGET, made)
    elif TARGET.read_text(encoding="utf-8") != made:
        sys.exit(f"{TARGET.relative_to(ROOT)}: not what benchmarks/results says: python benchmarks/write_proof.py")


if __name__ == "__main__":
    main()
