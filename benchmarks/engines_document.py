"""Tables of docs/engines/: records of benchmarks/engines/."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backends_document import markdown
from share_plot import write_png

from engines import common

__all__ = ["answers", "loading", "picture", "served", "serving_picture", "speed", "steps"]

COLUMNS = {"moe_us_1": "1", "moe_us_16": "16", "moe_us_64": "64", "moe_us_256": "256", "moe_us_prefill": "8192"}
"""Fields of a record of ``speed``, and the number of tokens of such a step."""
STEP_BATCHES = (1, 16, 64, 256)
NEW_SERVER = "\n(new server)"


def answers(path: Path, engine: str) -> str:
    """Answers of the bundled checkpoints, by checkpoint and parallelism: polymoe's beside those of ``engine``'s own."""
    last: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in _rows(path):
        if "model" in row and not row.get("reload"):
            parallel = _ranks(row) + (", batch-invariant" if row.get("batch_invariant") else "")
            last.setdefault((row["model"], parallel), {})[row["experts"]] = row
    cells = []
    for (model, parallel), by in sorted(last.items(), key=lambda item: (not item[0][1].startswith("one GPU"), item[0])):
        texts = [_answered(by.get(experts)) for experts in ("polymoe", engine.lower())]
        cells.append([f"`{model}`", parallel, *texts, _largest_error(by.get("polymoe"))])
    if not cells:
        return "Not run yet.\n"
    head = ["checkpoint", "ranks", "right with polymoe", f"right with {engine}'s own", "largest error of a layer"]
    return markdown(head, cells)


def _ranks(row: dict[str, Any]) -> str:
    if "dp" in row:
        return f"DP {row['dp']}" + (f", EP {row['dp']}" if row["ep"] else "")
    return "one GPU" if row["tp"] == 1 else f"{'EP' if row['ep'] else 'TP'} {row['tp']}"


def speed(path: Path, engine: str) -> str:
    """Microseconds in the experts of ``engine`` by number of tokens: polymoe, each other backend, the floor on an H200,
    and the ratio."""
    cells = []
    for case, by in _timed(path, eager=True).items():
        heads = iter((f"`{case}`",))
        for row in by.values():
            times = [f"{row[name]:.0f}" if name in row else "" for name in COLUMNS]
            if "error" in row:
                times = [f"does not start: `{_short(row['error'])}`", *times[1:]]
            cells.append([next(heads, ""), _name(row, engine), *times])
        if case in common.CASES:
            least = common.floors(case, "h200")
            cells.append(["", "floor", *(f"{least[name.replace('moe', 'floor')]:.0f}" for name in COLUMNS)])
        found = _ratios(by)
        ratios = [f"**{found[name]:.2f}**" if name in found else "" for name in COLUMNS]
        cells.append(["", "fastest other / polymoe", *ratios])
    return markdown(["case", "experts", *COLUMNS.values()], cells) if cells else "Not run yet.\n"


def picture(path: Path, engine: str, png: Path) -> None:
    """Draw the ratios of :func:`speed` over tokens, one line for each case; nothing without a ratio."""
    from matplotlib.figure import Figure

    lines = {case: _ratios(by) for case, by in _timed(path, eager=True).items()}
    if not any(lines.values()):
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (case, ratios) in enumerate(lines.items()):
        points = [(int(tokens), ratios[name]) for name, tokens in COLUMNS.items() if name in ratios]
        if points:
            axes.plot(*zip(*points, strict=True), marker="osD^v"[i % 5], label=case)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(tokens) for tokens in COLUMNS.values()], list(COLUMNS.values()))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in a step")
    axes.set_ylabel("time of the fastest other backend / polymoe's")
    axes.set_title(f"Time in the experts of {engine}, one H200")
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(figure, png)


def served(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The last record of ``vllm bench serve`` by rate and experts; of servers that had answered the same requests
    before, where there is one."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in sorted((row for row in _rows(path) if "rate" in row), key=lambda row: "compiled" in row):
        found.setdefault(row["rate"], {})[row["experts"]] = row
    return dict(sorted(found.items(), key=lambda item: float(item[0])))


def serving_picture(path: Path, engine: str, png: Path) -> None:
    """Draw the tokens per second and the 99th percentile between two tokens of :func:`served`; nothing without one."""
    from matplotlib.figure import Figure

    rates = served(path)
    if not rates:
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    fields = {"output_throughput": "output tokens per second", "p99_itl_ms": "ms between two tokens, 99th percentile"}
    for axes, (field, label) in zip(panels, fields.items(), strict=True):
        for i, (experts, name) in enumerate((("polymoe", "polymoe"), ("auto", f"{engine}'s choice"))):
            values = [by[experts][field] for by in rates.values()]
            bars = axes.bar([x + 0.4 * i for x in range(len(rates))], values, width=0.38, label=name)
            axes.bar_label(bars, fmt="{:.0f}", fontsize=8)
        names = [f"{r}{'' if 'compiled' in by['polymoe'] else NEW_SERVER}" for r, by in rates.items()]
        axes.set_xticks([x + 0.2 for x in range(len(rates))], [n.replace("inf", "all at once") for n in names])
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(axes.get_ylim()[0])))
        axes.set_xlabel("requests a second")
        axes.set_title(label, fontsize=10)
    panels[0].legend(loc="upper left")
    model = next(iter(rates.values()))["polymoe"]["model"]
    figure.suptitle(f"{model} in {engine} on one H100, 1,024 tokens in and 256 out")
    write_png(figure, png)


def _timed(path: Path, *, eager: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """The last record of each case and backend: of those without CUDA graphs, or with them."""
    last: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _rows(path):
        if row.get("eager") is eager and "case" in row:
            last.setdefault(row["case"], {})[row["experts"]] = row
    return last


def _ratios(by: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Time of the fastest other backend over polymoe's, by column, where both ran."""
    ours = by.get("polymoe", {})
    others = [row for name, row in by.items() if name != "polymoe"]
    best = {name: [row[name] for row in others if name in row] for name in COLUMNS if name in ours}
    return {name: min(times) / ours[name] for name, times in best.items() if times}


def steps(path: Path, engine: str) -> str:
    """Output tokens per second by batch, with the microseconds of a step on the GPU, and the ratios of both."""
    cells = []
    for case, by in _timed(path, eager=False).items():
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
            ours, best = by.get("polymoe", {}), max(others, key=lambda r: r[rate], default=None)
            both = best and step in ours
            ratios.append(f"**{ours[rate] / best[rate]:.2f}** ({best[step] / ours[step]:.2f})" if both else "")
        cells.append(["", "polymoe / fastest other", *ratios])
    return markdown(["case", "experts", *map(str, STEP_BATCHES)], cells) if cells else "Not run yet.\n"


def loading(path: Path, engine: str) -> str:
    """Seconds to load and until the engine is ready, and GB of the GPU's memory at most and afterwards."""
    cells = []
    for case, by in _timed(path, eager=True).items():
        layers = next(iter(by.values()))["layers"]
        heads = iter((f"`{case}`, {layers} layers",))
        for row in by.values():
            if "loaded_bytes" in row and row["layers"] == layers:
                bytes_ = [f"{row[name] / 1e9:.1f}" for name in ("load_peak_bytes", "loaded_bytes")]
                seconds = [f"{row[name]:.1f}" for name in ("load_s", "ready_s")]
                cells.append([next(heads, ""), _name(row, engine), *seconds, *bytes_])
    head = ["case", "experts", "loaded after, s", "ready after, s", "most memory, GB", "afterwards, GB"]
    return markdown(head, cells) if cells else "Not run yet.\n"


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())


def _answered(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return f"{row['right']} of {row['of']}" if "right" in row else f"does not start: `{_short(row['error'])}`"


def _largest_error(row: dict[str, Any] | None) -> str:
    errors = [error for error in ((row or {}).get("layer_errors") or {}).values() if isinstance(error, float)]
    return f"{max(errors):.1e}" if errors else ""


def _short(error: str) -> str:
    """An error's type and the beginning of its message."""
    worker = r"(\[rank\d+\]:\s*|\(\w+ pid=\d+\) ERROR \S+ \S+ \[\S+\] )?"
    text = re.sub(rf"^(exit status -?\d+: )?{worker}", "", error).strip()
    # torch.compile tells of an exception in traced code so: raised exception TYPE([ConstantVariable(str: 'MESSAGE')])
    traced = re.search(r"raised exception (\w+)\(\[ConstantVariable\(str: (['\"])(.*)\2\)\]\)", text)
    text = f"{traced[1]}: {traced[3]}" if traced else text
    text = text.replace("|", "/").replace("`", "'")
    return text if len(text) <= 110 else text[:107] + "..."


def _name(row: dict[str, Any], engine: str) -> str:
    """What ran: polymoe, or the engine's backend with the name that it logs."""
    if row["experts"] != "auto":
        own = {"polymoe": "polymoe", "deep_gemm": "DeepGEMM", "flashinfer_cutlass": "FlashInfer CUTLASS"}
        return own.get(row["experts"]) or row["experts"].capitalize()
    log = " ".join(row.get("log", ()))
    chosen = re.search(r"Using '?(\w+)'? \w+ MoE backend|enabling (\w+) M[oO]E kernel", log)
    return f"{engine}'s choice{f', {(chosen[1] or chosen[2]).capitalize()}' if chosen else ''}"
