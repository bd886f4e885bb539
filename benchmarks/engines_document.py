"""Tables of docs/engines/: records of benchmarks/engines/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backends_document import markdown

__all__ = ["answers", "speed", "steps"]

COLUMNS = {"moe_us_1": "1", "moe_us_16": "16", "moe_us_64": "64", "moe_us_256": "256", "moe_us_prefill": "8192"}
"""Fields of a record of ``speed``, and the number of tokens of such a step."""
STEP_BATCHES = (1, 16, 64, 256)


def answers(path: Path, engine: str) -> str:
    """Answers of the bundled checkpoints, by checkpoint and parallelism: polymoe's beside those of ``engine``'s own."""
    last: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in _rows(path):
        if "model" in row and not row.get("reload"):
            parallel = "one GPU" if row["tp"] == 1 else f"{'EP' if row['ep'] else 'TP'} {row['tp']}"
            last.setdefault((row["model"], parallel), {})[row["experts"]] = row
    cells = []
    for (model, parallel), by in sorted(last.items(), key=lambda item: (item[0][1] != "one GPU", item[0])):
        texts = [_answered(by.get(experts)) for experts in ("polymoe", engine.lower())]
        cells.append([f"`{model}`", parallel, *texts])
    if not cells:
        return "Not run yet.\n"
    return markdown(["checkpoint", "ranks", "right with polymoe", f"right with {engine}'s own"], cells)


def speed(path: Path, engine: str) -> str:
    """Microseconds in the experts of ``engine`` by number of tokens: polymoe, each other backend, and the ratio."""
    last: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _rows(path):
        if row.get("eager") and "case" in row:
            last.setdefault(row["case"], {})[row["experts"]] = row
    cells = []
    for case, by in last.items():
        heads = iter((f"`{case}`",))
        for row in by.values():
            times = [f"{row[name]:.0f}" if name in row else "" for name in COLUMNS]
            if "error" in row:
                times = [f"does not start: `{_short(row['error'])}`", *times[1:]]
            cells.append([next(heads, ""), _name(row, engine), *times])
        best = {c: min((r[c] for n, r in by.items() if n != "polymoe" and c in r), default=None) for c in COLUMNS}
        ours = by.get("polymoe", {})
        ratios = [f"**{best[c] / ours[c]:.2f}**" if best[c] and c in ours else "" for c in COLUMNS]
        cells.append(["", "fastest other / polymoe", *ratios])
    return markdown(["case", "experts", *COLUMNS.values()], cells) if cells else "Not run yet.\n"


def steps(path: Path, engine: str) -> str:
    """Output tokens per second by batch, with the microseconds of a step on the GPU, and the ratios of both."""
    last: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _rows(path):
        if row.get("eager") is False and "case" in row:
            last.setdefault(row["case"], {})[row["experts"]] = row
    cells = []
    for case, by in last.items():
        heads = iter((f"`{case}`",))
        for row in by.values():
            found = [
                f"{row[f'decode_tokens_per_s_{b}']:.0f} ({row[f'step_us_{b}']:.0f})" if f"step_us_{b}" in row else ""
                for b in STEP_BATCHES
            ]
            if "error" in row:
                found = [f"does not start: `{_short(row['error'])}`", *found[1:]]
            cells.append([next(heads, ""), _name(row, engine), *found])
        ratios = []
        for batch in STEP_BATCHES:
            rate, step = f"decode_tokens_per_s_{batch}", f"step_us_{batch}"
            others = [r for n, r in by.items() if n != "polymoe" and step in r]
            ours, best = by["polymoe"], max(others, key=lambda r: r[rate], default=None)
            ratios.append(f"**{ours[rate] / best[rate]:.2f}** ({best[step] / ours[step]:.2f})" if best else "")
        cells.append(["", "polymoe / fastest other", *ratios])
    return markdown(["case", "experts", *map(str, STEP_BATCHES)], cells)


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())


def _answered(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return f"{row['right']} of {row['of']}" if "right" in row else f"does not start: `{_short(row['error'])}`"


def _short(error: str) -> str:
    """An error's type and the beginning of its message."""
    text = re.sub(r"^(exit status -?\d+: )?(\[rank\d+\]:\s*)?", "", error).strip()
    # torch.compile tells of an exception in traced code so: raised exception TYPE([ConstantVariable(str: 'MESSAGE')])
    traced = re.search(r"raised exception (\w+)\(\[ConstantVariable\(str: (['\"])(.*)\2\)\]\)", text)
    text = f"{traced[1]}: {traced[3]}" if traced else text
    text = text.replace("|", "/").replace("`", "'")
    return text if len(text) <= 110 else text[:107] + "..."


def _name(row: dict[str, Any], engine: str) -> str:
    """What ran: polymoe, or the engine's backend with the name that it logs."""
    if row["experts"] != "auto":
        return row["experts"] if row["experts"] == "polymoe" else row["experts"].capitalize()
    log = " ".join(row.get("log", ()))
    chosen = re.search(r"Using '?(\w+)'? \w+ MoE backend|enabling (\w+) M[oO]E kernel", log)
    return f"{engine}'s choice{f', {(chosen[1] or chosen[2]).capitalize()}' if chosen else ''}"
