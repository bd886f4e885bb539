"""Parts of the documentation that follow from code and records: docs/backends.md, and the tables between markers in
README.md and in documents of docs/. Needs no GPU, and gives the same text on every machine.

python benchmarks/write_docs.py            # rewrite them
python benchmarks/write_docs.py --check    # exit with 1 if one of them is not what code and records say
python benchmarks/write_docs.py --picture  # rewrite them and draw the picture of docs/measured.md (needs matplotlib)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from backends_document import backends_document, markdown

from polymoe.bench.decode import ModelRecord
from polymoe.bench.plot import plot
from polymoe.bench.records import Record, newest, read, read_lines
from polymoe.bench.serving import record as serving
from polymoe.bench.serving import report

ROOT = Path(__file__).resolve().parents[1]
RECORDS = {"triton": "triton-h200.jsonl", "cuda": "hopper-h200.jsonl"}
"""Files of kernels' times in benchmarks/results/, by the backend they were taken for; one that is not there has none.
docs/measured.md says of each backend what its file holds, README's table is of the newest in all."""

DECODE, SERVE = "decode-h200.jsonl", "serve-h200.jsonl"
"""Records of ``polymoe bench decode`` and ``polymoe bench serve``; a document has no table before they are there."""

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
"""Columns of README's table."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What was asked of one case in one format, by tokens.

    Attributes:
        us: microseconds at most.
        share: of the floor at least.
        times_mxfp4: the case's own time in MXFP4 at most so many times, wherever both have a record.
        below_mxfp4: a share of the floor at most so much below that in MXFP4, wherever both have a record.
    """

    us: Mapping[int, float] = field(default_factory=dict)
    share: Mapping[int, float] = field(default_factory=dict)
    times_mxfp4: float | None = None
    below_mxfp4: float | None = None


def _shares(share: float, *tokens: int) -> dict[int, float]:
    return dict.fromkeys(tokens, share)


LIMITS: Mapping[str, Mapping[tuple[str, str], Limit]] = {
    "triton": {
        ("deepseek-v4-flash", "mxfp4"): Limit({
            1: 75, 4: 180, 16: 500, 64: 1100, 128: 1300, 256: 1400, 512: 1500, 1024: 1850, 4096: 3800, 8192: 7400,
        }),
        ("deepseek-v4-flash", "int4_g32"): Limit(times_mxfp4=1.1),
        ("deepseek-v4-flash", "nvfp4"): Limit(times_mxfp4=1.1),
        ("gpt-oss-120b", "mxfp4"): Limit({1: 50, 16: 300, 64: 580, 1024: 1000, 4096: 2500}),
        ("deepseek-v3-tp8", "fp8_block128"): Limit({1: 30, 16: 165, 64: 325, 256: 390, 1024: 480, 4096: 900}),
        ("qwen3-235b-tp4-bf16", "bf16"): Limit({1: 30, 16: 195, 64: 300, 1024: 380, 4096: 750}),
    },
    "cuda": {
        ("deepseek-v4-flash", "mxfp4"): Limit({
            1: 33, 2: 55, 4: 100, 8: 180, 16: 330, 32: 540, 64: 800, 128: 970, 256: 1020, 512: 1030, 1024: 1120,
            2048: 1500, 4096: 2400, 8192: 4600,
        }),
        ("deepseek-v4-flash", "mxfp4, fp8_group128"): Limit({
            1: 42, 2: 60, 4: 97, 8: 165, 16: 280, 32: 450, 64: 655, 128: 830, 256: 870, 512: 890, 1024: 920,
            2048: 1100, 4096: 1500, 8192: 2900,
        }),
        ("deepseek-v4-flash", "int4_g32"): Limit(below_mxfp4=0.05),
        ("deepseek-v4-flash", "nvfp4"): Limit(below_mxfp4=0.05),
        ("gpt-oss-120b", "mxfp4"): Limit(share=_shares(0.70, 16, 64, 128, 256)),
        ("gpt-oss-20b", "mxfp4"): Limit(share=_shares(0.70, 16, 64, 128, 256)),
        ("kimi-k2-tp8", "int4_g32"): Limit(share=_shares(0.70, 16, 64, 128, 256)),
        ("nemotron-3-super", "nvfp4"): Limit(share=_shares(0.70, 16, 64, 128, 256)),
        ("deepseek-v3-tp8", "fp8_block128"): Limit({1024: 450, 4096: 700}, share=_shares(0.88, 64, 128, 256)),
        ("qwen3-235b-tp4-bf16", "bf16"): Limit({4096: 600}, share=_shares(0.88, 16, 64, 128, 256)),
    },
}  # fmt: skip
"""What each backend's kernels were asked to reach on one H200: by case and format (:func:`_form`)."""

PEERS: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("deepseek-v4-flash", "mxfp4"): {
        1: 51.9, 2: 82.6, 4: 144, 8: 232, 16: 401, 32: 654, 64: 980, 128: 1231, 256: 1297, 512: 1392, 1024: 1473,
        2048: 2056, 4096: 3204, 8192: 6104,
    },
    ("deepseek-v4-flash", "mxfp4, fp8_group128"): {
        1: 47.6, 2: 64.9, 4: 105, 8: 172, 16: 286, 32: 453, 64: 662, 128: 878, 256: 915, 512: 952, 1024: 977,
        2048: 1264, 4096: 1660, 8192: 3485,
    },
}  # fmt: skip
"""The fastest of Humming, Marlin, triton_kernels and FlashInfer on the same GPU, in microseconds; with E4M3 rows,
Humming's with one scale a row."""

PICTURE = ("deepseek-v4-flash", "mxfp4", ("cuda", "triton"))
"""Case, format and backends of docs/deepseek-v4-flash-h200.png."""


def _form(record: Record) -> str:
    """The weights' format, and how x is held where the checkpoint's weights alone do not say so."""
    own = record.activations == "16bit" or record.format.startswith("fp8")
    return record.format if own else f"{record.format}, {record.activations}"


def records(*backends: str) -> list[Record]:
    """The newest record of each key, in the files of these backends or in all."""
    paths = [ROOT / "benchmarks" / "results" / RECORDS[name] for name in backends or RECORDS]
    return newest(record for path in paths if path.exists() for record in read(path))


def times(found: Sequence[Record]) -> str:
    """README's table: microseconds, and share of the floor; backends of a case one after the other."""
    rows: dict[tuple[str, str, str], dict[str, dict[int, Record]]] = {}
    for r in found:
        if r.routing == "uniform":
            rows.setdefault((f"`{r.case}`", r.format, r.activations), {}).setdefault(r.backend, {})[r.tokens] = r
    cells = [
        [*row, backend, *(f"{number(by[t].median_us)} ({by[t].share:.2f})" if t in by else "" for t in TOKENS)]
        for row, backends in rows.items()
        for backend, by in sorted(backends.items())
    ]
    return markdown(["case", "weights", "activations", "backend", *map(str, TOKENS)], cells)


def limits(found: Sequence[Record], backend: str, others: Sequence[Record] = ()) -> str:
    """docs/measured.md's table of a backend: the limit of each time, and the time; in bold what is above it, and by how
    much; ``none`` where there is no record. Empty before there is any of this backend. ``others`` have floors too."""
    floors = {(r.case, _form(r), r.tokens): r.floor_us for r in (*others, *found) if r.routing == "uniform"}
    measured: dict[tuple[str, str], dict[int, Record]] = {}
    for r in found:
        if r.backend == backend and r.routing == "uniform":
            measured.setdefault((r.case, _form(r)), {})[r.tokens] = r
    if not measured:
        return ""
    columns = sorted({t for limit in LIMITS[backend].values() for t in (*limit.us, *limit.share)})
    peers = PEERS if backend == "cuda" else {}  # Triton's limits were not set by them
    rows = []
    for (case, form), limit in LIMITS[backend].items():
        by = measured.get((case, form), {})
        most = dict(limit.us)
        most |= {t: floors[case, form, t] / s for t, s in limit.share.items() if (case, form, t) in floors}
        for t, mxfp4 in measured.get((case, "mxfp4"), {}).items():
            if limit.times_mxfp4 is not None and t in by:
                most[t] = limit.times_mxfp4 * mxfp4.median_us
            if limit.below_mxfp4 is not None and t in by:
                most[t] = by[t].floor_us / (mxfp4.share - limit.below_mxfp4)
        heads = iter((f"`{case}`, {form}",))
        if (case, form) in peers:
            peer = peers[case, form]
            rows.append([next(heads, ""), "best peer", *(number(peer[t]) if t in peer else "" for t in columns)])
        rows.append([next(heads, ""), "at most", *(number(most[t]) if t in most else "" for t in columns)])
        rows.append(["", "time", *(reached(by.get(t), most.get(t)) for t in columns)])
        if backend == "cuda":
            rows.append(["", "share of floor", *(f"{by[t].share:.2f}" if t in by else "" for t in columns)])
    return markdown(["case", "", *map(str, columns)], rows)


def calls(found: Sequence[Record]) -> str:
    """docs/measured.md's table of calls that differ from the usual ones in one thing."""
    by: dict[str, dict[int, Record]] = {}
    case, form, (backend, _) = PICTURE
    for r in found:
        if (r.backend, _form(r)) == (backend, form) and r.case in (case, f"{case}[batch invariant]"):
            name = "any batch, the same result" if r.case != case else f"{r.routing} routing"
            by.setdefault(name, {})[r.tokens] = r
    usual = by.pop("uniform routing", {})
    columns = sorted({t for others in by.values() for t in others})
    if not columns:
        return ""
    rows = [
        [name, *(f"{number(of[t].median_us)} ({of[t].share:.2f})" if t in of else "" for t in columns)]
        for name, of in {"uniform routing": usual, **by}.items()
    ]
    return markdown(["", *map(str, columns)], rows)


def reached(record: Record | None, most_us: float | None) -> str:
    """The time; in bold if it is above the limit, and by how much."""
    if record is None:
        return "" if most_us is None else "none"
    if most_us is None or record.median_us <= most_us:
        return number(record.median_us)
    return f"**{number(record.median_us)}** (+{100 * (record.median_us / most_us - 1):.1f} %)"


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
    text = measured.read_text(encoding="utf-8")
    for backend in LIMITS:
        text = between(text, f"limits of {backend}", limits(records(backend), backend, found))
    text = between(text, "calls", calls(records("cuda")))
    return {
        ROOT / "docs" / "backends.md": backends_document(),
        readme: between(readme.read_text(encoding="utf-8"), "times", times(found)),
        measured: text,
        decoding: between(decoding.read_text(encoding="utf-8"), "decode", decode(results / DECODE)),
        server: between(server.read_text(encoding="utf-8"), "serve", serve(results / SERVE)),
    }


def picture(path: Path) -> None:
    """Draw shares of the floor over tokens: docs/measured.md's PNG. Not part of --check, since its bytes depend on
    matplotlib's version."""
    case, form, backends = PICTURE
    found = (r for r in records() if (r.case, r.format, r.routing) == (case, form, "uniform"))
    plot(sorted((r for r in found if r.backend in backends), key=lambda r: r.backend), path)


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true")
    action.add_argument("--picture", action="store_true")
    options = parser.parse_args()
    stale = {p: s for p, s in documents().items() if not p.exists() or p.read_text(encoding="utf-8") != s}
    if options.check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"{names}: not what code and records say; run python benchmarks/write_docs.py")
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    if options.picture:
        picture(ROOT / "docs" / "deepseek-v4-flash-h200.png")


if __name__ == "__main__":
    main()
