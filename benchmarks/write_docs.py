"""Parts of the documentation that follow from code and records: docs/backends.md, and the tables between markers in
README.md and in documents of docs/. Needs no GPU, and gives the same text on every machine.

python benchmarks/write_docs.py            # rewrite them
python benchmarks/write_docs.py --check    # exit with 1 if one of them is not what code and records say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from backends_document import backends_document, markdown

from polymoe.bench.decode import ModelRecord
from polymoe.bench.records import Record, newest, read, read_lines
from polymoe.bench.serving import record as serving
from polymoe.bench.serving import report

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ("triton-h200.jsonl",)
"""Files of kernels' times in benchmarks/results/."""

DECODE, SERVE = "decode-h200.jsonl", "serve-h200.jsonl"
"""Records of ``polymoe bench decode`` and ``polymoe bench serve``; a document has no table before they are there."""

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
"""Columns of README's table."""

# Times that the Triton kernels were asked to reach on one H200: (case, format): {tokens: microseconds}, or a share more
# than the same case takes in MXFP4.
LIMITS: Mapping[tuple[str, str], Mapping[int, float] | float] = {
    ("deepseek-v4-flash", "mxfp4"): {
        1: 75, 4: 180, 16: 500, 64: 1100, 128: 1300, 256: 1400, 512: 1500, 1024: 1850, 4096: 3800, 8192: 7400,
    },
    ("deepseek-v4-flash", "int4_g32"): 0.1,
    ("deepseek-v4-flash", "nvfp4"): 0.1,
    ("gpt-oss-120b", "mxfp4"): {1: 50, 16: 300, 64: 580, 1024: 1000, 4096: 2500},
    ("deepseek-v3-tp8", "fp8_block128"): {1: 30, 16: 165, 64: 325, 256: 390, 1024: 480, 4096: 900},
    ("qwen3-235b-tp4-bf16", "bf16"): {1: 30, 16: 195, 64: 300, 1024: 380, 4096: 750},
}  # fmt: skip


def records() -> list[Record]:
    """The newest record of each key."""
    return newest(record for name in RECORDS for record in read(ROOT / "benchmarks" / "results" / name))


def times(found: Sequence[Record]) -> str:
    """README's table: microseconds, and share of the floor."""
    rows: dict[tuple[str, ...], dict[int, Record]] = {}
    for r in found:
        if r.routing == "uniform":
            rows.setdefault((f"`{r.case}`", r.format, r.activations, r.backend), {})[r.tokens] = r
    cells = [
        [*row, *(f"{number(by[t].median_us)} ({by[t].share:.2f})" if t in by else "" for t in TOKENS)]
        for row, by in rows.items()
    ]
    return markdown(["case", "weights", "activations", "backend", *map(str, TOKENS)], cells)


def limits(found: Sequence[Record]) -> str:
    """docs/measured.md's table: the limit of each time, and the time; in bold what is above it, and by how much."""
    time_us = {
        (r.case, r.format, r.tokens): r.median_us for r in found if r.backend == "triton" and r.routing == "uniform"
    }
    columns = sorted({tokens for limit in LIMITS.values() if isinstance(limit, Mapping) for tokens in limit})
    rows = []
    for (case, form), limit in LIMITS.items():
        if isinstance(limit, Mapping):
            most = limit
        else:
            most = {t: (1 + limit) * time_us[case, "mxfp4", t] for t in columns if (case, form, t) in time_us}
        rows.append([f"`{case}`, {form}", "at most", *(number(most[t]) if t in most else "" for t in columns)])
        rows.append(["", "time", *(reached(time_us[case, form, t], most[t]) if t in most else "" for t in columns)])
    return markdown(["case", "", *map(str, columns)], rows)


def reached(time_us: float, most_us: float) -> str:
    """The time; in bold if it is above the limit, and by how much."""
    above = f"{100 * (time_us / most_us - 1):.1f}"
    return number(time_us) if time_us <= most_us else f"**{number(time_us)}** (+{above} %)"


def decode(path: Path) -> str:
    """docs/decoding.md's table: packed beside the fastest dequantized, of the newest record of each."""
    if not path.exists():
        return ""
    last: dict[tuple[object, ...], ModelRecord] = {}
    for values in read_lines(path, (f.name for f in fields(ModelRecord)), "a record of bench decode"):
        r = ModelRecord(**values)
        # Whichever backend the plan chose that day, packed experts have one line.
        key = (r.phase, r.batch, r.tokens, r.experts, None if r.experts == "packed" else r.implementation)
        if key not in last or r.date >= last[key].date:
            last[key] = r
    others = [r for r in last.values() if r.experts != "packed"]
    pairs = []
    for r in last.values():
        same = [o for o in others if (o.phase, o.batch, o.tokens) == (r.phase, r.batch, r.tokens)]
        if r.experts == "packed" and same:
            pairs.append((r, min(same, key=lambda other: other.median_us)))
    if not pairs:
        return ""
    rows = []
    for r, other in pairs:
        after = f"decode, batch {r.batch}, after {r.tokens} tokens"
        named = after if r.phase == "decode" else f"prefill of {r.tokens} tokens, {r.attention}"
        cells = [f"{x.tokens_per_second:,.0f} ({x.implementation})" for x in (r, other)]
        shares = ["" if x.share is None else f"{x.share:.2f}" for x in (r, other)]
        rows.append([named, *cells, f"{r.tokens_per_second / other.tokens_per_second:.2f}", *shares])
    r, other = max(pairs, key=lambda pair: pair[0].date)
    weights = [f"{x.weight_bytes / 1e9:.1f} GB" for x in (r, other)]
    rows.append(["weights, once loaded", *weights, f"{r.weight_bytes / other.weight_bytes:.2f}", "", ""])
    header = [f"{r.checkpoint}, {r.device}", "packed, tokens/s", "dequantized, tokens/s", "ratio"]
    header += ["share of floor, packed", "dequantized"]
    said = f"torch {r.torch}, transformers {r.transformers}, triton {r.triton}, polymoe {r.commit}, {r.date[:10]}"
    return f"{markdown(header, rows)}\n`{r.command}`: {said}.\n"


def serve(path: Path) -> str:
    """docs/serving.md's tables: the newest rows of each pair of lengths."""
    if not path.exists():
        return ""
    tables: dict[tuple[object, ...], list[serving.ServingRecord]] = {}
    for r in serving.newest(serving.read(path)):
        tables.setdefault(r.series, []).append(r)
    return "\n".join(report.markdown(sorted(rows, key=lambda r: r.load)) for rows in tables.values())


def number(time_us: float) -> str:
    """Three digits, or all before the point."""
    return f"{time_us:.{1 if time_us < 99.95 else 0}f}"


def between(text: str, name: str, part: str) -> str:
    """The text with ``part`` between the markers of that name.

    Raises:
        ValueError: unless each marker is there once.
    """
    start, end = f"<!-- {name}: written by benchmarks/write_docs.py -->\n", f"<!-- end of {name} -->\n"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"expected the lines {start.strip()} and {end.strip()} once each")
    before, _, rest = text.partition(start)
    return before + start + part + end + rest.partition(end)[2]


def documents() -> dict[Path, str]:
    """Each file as it should be."""
    found, readme, measured = records(), ROOT / "README.md", ROOT / "docs" / "measured.md"
    decoding, server = ROOT / "docs" / "decoding.md", ROOT / "docs" / "serving.md"
    results = ROOT / "benchmarks" / "results"
    return {
        ROOT / "docs" / "backends.md": backends_document(),
        readme: between(readme.read_text(encoding="utf-8"), "times", times(found)),
        measured: between(measured.read_text(encoding="utf-8"), "limits", limits(found)),
        decoding: between(decoding.read_text(encoding="utf-8"), "decode", decode(results / DECODE)),
        server: between(server.read_text(encoding="utf-8"), "serve", serve(results / SERVE)),
    }


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = {p: s for p, s in documents().items() if not p.exists() or p.read_text(encoding="utf-8") != s}
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"{names}: not what code and records say; run python benchmarks/write_docs.py")
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
