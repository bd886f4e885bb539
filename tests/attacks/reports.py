"""The reports of a campaign, one JSON line for each case, and their summary."""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from attacks.verbs import VERBS
from attacks.verdicts import FAILURES, VERDICTS

__all__ = ["made", "read", "record", "summary"]


def read(out: Path) -> list[dict[str, Any]]:
    """The reports in a file; a line that was cut by an interruption is left out."""
    reports = []
    for line in out.read_text().splitlines() if out.exists() else ():
        try:
            reports.append(json.loads(line))
        except ValueError:
            continue
    return reports


def record(reports: list[dict[str, Any]], command: str, commit: str | None) -> dict[str, Any]:
    """What a campaign has found on this machine, as a line of benchmarks/results/attacks.jsonl."""
    verdicts = {verb: Counter(r["verdict"] for r in reports if r["verb"] == verb) for verb in VERBS}
    return {
        "mutated_checkpoints": len({(r["checkpoint"], r["seed"]) for r in reports}),
        "cases": len(reports),
        "failures": sum(r["verdict"] in FAILURES for r in reports),
        "slowest_s": max(r["seconds"] for r in reports),
        "verdicts": {verb: {v: count[v] for v in VERDICTS if count[v]} for verb, count in verdicts.items() if count},
        **made(command, commit),
    }


def made(command: str, commit: str | None) -> dict[str, str]:
    """With what and when a record was made."""
    import torch
    import transformers

    from polymoe.bench.records import source, utc_now

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or source(),
        "date": utc_now(),
        "command": command,
    }


def summary(reports: list[dict[str, Any]]) -> str:
    """Verbs by verdicts, and every kind of failure with the number of cases and commands that repeat them."""
    count = Counter((r["verb"], r["verdict"]) for r in reports)
    width = max(map(len, VERDICTS)) + 2
    lines = ["".join(["verb".ljust(14), *(v.rjust(width) for v in VERDICTS)])]
    for verb in [v for v in VERBS if any(r["verb"] == v for r in reports)]:
        lines.append("".join([verb.ljust(14), *(str(count[verb, v] or "-").rjust(width) for v in VERDICTS)]))
    failed: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for r in reports:
        if r["verdict"] in FAILURES:
            place = r["kind"] if r["verdict"] in ("changed", "accepted") else r["at"]
            failed[r["verdict"], r["error"], place].append(r)
    changed = len({(r["checkpoint"], r["seed"]) for r in reports})
    total = sum(map(len, failed.values()))
    lines.append(f"{len(reports)} cases, {changed} mutated checkpoints, {total} failures of {len(failed)} kinds")
    for (verdict, error, place), group in sorted(failed.items(), key=lambda item: -len(item[1])):
        first = min(group, key=lambda r: (r["seed"], r["checkpoint"]))
        verbs = ", ".join(sorted({r["verb"] for r in group}))
        text = (first["message"].strip().splitlines() or [""])[-1 if verdict == "vague" else 0]
        did = f"; did: {', '.join(first['did'])}" if first["did"] else ""
        lines += [
            f"\n{len(group):4d} {verdict} {error} at {place} ({verbs}){did}",
            f"     {first['change'][:160]}",
            f"     {text[:200]}",
            *(
                f"     --case {r['checkpoint']}:{r['seed']} --kinds {r['kind']} --verbs {r['verb']}"
                for r in sorted(group, key=lambda r: r["seconds"])[:3]
            ),
        ]
    return "\n".join(lines)
