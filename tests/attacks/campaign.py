"""Mutated checkpoints through every verb, in worker processes; a table of the verdicts, and what failed.

    python -m tests.attacks.campaign --count 3000 --seed 0 --jobs 8 --out attacks.jsonl
    python -m tests.attacks.campaign --case sums-qwen3-fp8:17 --verbs run --keep /tmp/case    # one case, in full

A case is a checkpoint, a seed and a verb. Each is one line of ``--out``; a second run with the same file does only what
is missing there. Checkpoints take turns: of ``--count`` 3000, each of eleven gets 272 or 273 seeds from ``--seed`` on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from attacks.mutations import CHECKPOINTS, MUTATORS, mutation  # noqa: E402
from attacks.reports import read, record, summary  # noqa: E402
from attacks.sandbox import Outcome, run  # noqa: E402
from attacks.source import Mutation, Source, write  # noqa: E402
from attacks.verbs import VERBS  # noqa: E402
from attacks.verdicts import FAILURES, judge  # noqa: E402

LIMIT_S = 10.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One verb on one mutated checkpoint."""

    checkpoint: str
    seed: int
    verb: str

    def change(self, kinds: tuple[str, ...]) -> tuple[Mutation, int]:
        """The mutation, and the layer to load."""
        source = Source.of(self.checkpoint)
        changed = mutation(source, self.seed, kinds)
        layer = random.Random(self.seed).choice(source.layers) if changed.layer is None else changed.layer
        return changed, layer


class Attacks:
    """Runs cases below a directory, and keeps what each verb answers to the original checkpoints."""

    def __init__(self, home: Path, kinds: tuple[str, ...], limit_s: float) -> None:
        self.home, self.kinds, self.limit_s = home, kinds, limit_s
        self.imported = home / "imported"
        (home / "originals").mkdir(exist_ok=True)

    def original(self, checkpoint: str, verb: str, layer: int) -> Outcome:
        """What a verb does with an original checkpoint, found once by whoever needs it first."""
        known = self.home / "originals" / f"{checkpoint} {verb} {layer}"
        if not known.exists():
            outcome = self._outcome(checkpoint, Mutation("none", "", ()), verb, layer, 60, imported=self.imported)
            if outcome.ended == "refused":  # as by a version of Transformers that does not know the family
                print(f"{verb} {checkpoint}, unchanged: {outcome.message.strip()[-500:]}", file=sys.stderr)
            elif outcome.ended != "answer":
                raise SystemExit(f"{verb} {checkpoint}, unchanged: {outcome}")
            new = known.with_name(f"{os.getpid()}.new")
            new.write_text(json.dumps(outcome.to_dict()))
            new.rename(known)
        return Outcome(**json.loads(known.read_text()))

    def run(self, case: Case, keep: Path | None = None) -> dict[str, Any]:
        """Run a case; its line of the report."""
        changed, layer = case.change(self.kinds)
        source = Source.of(case.checkpoint)
        original = self.original(case.checkpoint, case.verb, layer)
        outcome = self._outcome(case.checkpoint, changed, case.verb, layer, self.limit_s, keep)
        if outcome.ended == "hung":  # once more, since the machine may have been busy, and what it waited for too
            again = self._outcome(case.checkpoint, changed, case.verb, layer, 6 * self.limit_s)
            outcome = outcome if again.ended == "hung" or again.cpu_seconds > self.limit_s else again
        names = (case.checkpoint, *source.files, *(edit.file for edit in changed.edits))
        verdict = judge(changed, case.verb, outcome, original, names)
        report = {
            "checkpoint": case.checkpoint, "seed": case.seed, "verb": case.verb, "layer": layer, "kind": changed.kind,
            "change": changed.text, "expect": changed.expect.name, "verdict": verdict, **outcome.to_dict(),
        }  # fmt: skip
        if verdict not in FAILURES:
            report["message"] = report["message"][-300:]
        report["answer"] = report["answer"][:200]
        return report

    def _outcome(
        self,
        checkpoint: str,
        changed: Mutation,
        verb: str,
        layer: int,
        limit_s: float,
        keep: Path | None = None,
        imported: Path | None = None,
    ) -> Outcome:
        home = Path(tempfile.mkdtemp(prefix="case-", dir=self.home)) if keep is None else keep
        try:
            write(Source.of(checkpoint), changed.edits, home / checkpoint)
            return run(VERBS[verb], home / checkpoint, layer, limit_s, imported)
        finally:
            if keep is None:
                shutil.rmtree(home, ignore_errors=True)


def warm_up(attacks: Attacks, checkpoints: list[str], verbs: list[str]) -> None:
    """Import what the verbs import, so that no case pays for it."""
    for checkpoint, verb in [*((checkpoints[0], verb) for verb in verbs), *((name, verbs[-1]) for name in checkpoints)]:
        attacks.original(checkpoint, verb, Source.of(checkpoint).layers[0])
        for name in attacks.imported.read_text().split():
            with warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                importlib.import_module(name)


def work(number: int, attacks: Attacks, cases: list[Case], following: Any, out: Path) -> None:
    """Take one case after the other, and append each report to ``out``."""
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while True:
        with following.get_lock():
            at = following.value
            following.value += 1
        if at >= len(cases):
            return
        os.write(file, json.dumps(attacks.run(cases[at])).encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="number of mutated checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="number of cases at a time")
    parser.add_argument("--verbs", default=",".join(VERBS), help="separated by commas")
    parser.add_argument("--checkpoints", default=",".join(CHECKPOINTS), help="separated by commas")
    parser.add_argument("--kinds", default=",".join(MUTATORS), help="mutators, separated by commas")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a case may take")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines, one for each case")
    parser.add_argument("--case", default=None, help="CHECKPOINT:SEED, one mutated checkpoint in full")
    parser.add_argument("--keep", type=Path, default=None, help="with --case and one verb: a new directory for it")
    parser.add_argument("--record", type=Path, default=None, help="append the sum of all cases to this file")
    parser.add_argument("--commit", default=None, help="for the record, if git does not know it")
    parser.add_argument("--summary", type=Path, default=None, help="sum up this file, and do nothing else")
    options = parser.parse_args()
    if options.summary:
        print(summary(read(options.summary)))
        return
    verbs, checkpoints = options.verbs.split(","), options.checkpoints.split(",")
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="attacks-") as temporary:
        os.environ["HF_HOME"] = os.environ["POLYMOE_CACHE"] = temporary
        attacks = Attacks(Path(temporary), tuple(options.kinds.split(",")), options.limit)
        if options.case:
            name, seed = options.case.split(":")
            if options.keep:
                options.keep.mkdir(parents=True)
            for verb in verbs:
                report = attacks.run(Case(name, int(seed), verb), options.keep)
                print(json.dumps(report, indent=1))
            return
        out = options.out or Path(temporary) / "attacks.jsonl"
        done = {(r["checkpoint"], r["seed"], r["verb"]) for r in read(out)}
        if out.exists() and not out.read_bytes().endswith(b"\n"):
            with out.open("ab") as file:  # after a line that was cut
                file.write(b"\n")
        cases = [
            case
            for number in range(options.count)
            for verb in verbs
            if (case := Case(checkpoints[number % len(checkpoints)], options.seed + number // len(checkpoints), verb))
            and (case.checkpoint, case.seed, case.verb) not in done
        ]
        warm_up(attacks, checkpoints, verbs)
        context = multiprocessing.get_context("fork")
        following = context.Value("l", 0)
        arguments = (attacks, cases, following, out)
        workers = [context.Process(target=work, args=(number, *arguments)) for number in range(options.jobs)]
        start = time.monotonic()
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            workers[0].join(30)
            finished = min(following.value, len(cases))
            print(f"{finished} of {len(cases)} cases, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            for worker in workers:
                worker.join(0.1)
        reports = read(out)
        print(summary(reports))
        if options.record:
            command = f"python -m tests.attacks.campaign --count {options.count} --seed {options.seed}"
            line = json.dumps(record(reports, command, options.commit)) + "\n"
            with options.record.open("a") as file:
                file.write(line)
        broken = any(worker.exitcode for worker in workers)
        sys.exit(1 if broken or any(r["verdict"] in FAILURES for r in reports) else 0)


if __name__ == "__main__":
    main()
