"""Parts of the documentation that follow from code and records: docs/backends.md, and the tables between markers in
README.md and in documents of docs/. Needs no GPU and writes the same text on every machine.

python benchmarks/write_docs.py            # rewrite them
python benchmarks/write_docs.py --check    # exit with 1 if one of them differs from code and records
python benchmarks/write_docs.py --picture  # rewrite them and draw the plots (needs matplotlib)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engines_document
import peers_document
import scale
import slots_plot
import versions_document
from backends_document import backends_document, markdown
from share_plot import plot, write_png

from polymoe.backends.cost import cost
from polymoe.bench.cases import CASES
from polymoe.bench.model_records import ModelRecord
from polymoe.bench.records import Record, read, read_lines
from polymoe.bench.serving import record as serving
from polymoe.bench.serving import report
from polymoe.bench.serving.measures import Percentiles
from polymoe.common.atomic import replace_file
from polymoe.common.install_command import install_command
from polymoe.common.json_input import read_fields
from polymoe.explanation import explain
from polymoe.machine import DEVICES
from polymoe.planning.measured import Table, newest
from polymoe.planning.table_files import read as read_table

ROOT = Path(__file__).resolve().parents[1]
RECORDS = {"triton": "triton-h200.jsonl", "cuda": "cuda-h200.jsonl"}
"""Files of kernel times in benchmarks/results/, by the backend they were taken for. A file that does not exist counts
as empty. docs/performance/ has one page for each."""

PEERS = {device: f"peers-{device}.jsonl" for device in ("h200", "h100")}
"""Times of other libraries' kernels in benchmarks/results/, and records of benchmarks/peer_times.py."""

SHIPPED = ROOT / "src" / "polymoe" / "planning" / "tables" / "h200.jsonl"

DECODE, SERVE = "decode-h200.jsonl", "serve-h200.jsonl"
"""Records of ``polymoe bench decode`` and ``polymoe bench serve``; without them their documents have no table."""

ENGINES = {"vLLM": "vllm-h200.jsonl", "SGLang": "sglang-h200.jsonl"}
"""Records of benchmarks/engines/, by engine; docs/engines/ has one page for each, which says so without records."""

ATTACKS = "attacks.jsonl"
"""Records of tests/attacks/campaign.py; without them docs/security.md says so."""

TRANSFORMERS_TESTS = "transformers-tests.jsonl"
"""Records of tests/support/transformers_suite.py, for docs/engines/transformers.md."""

README_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
README_ROWS = (
    ("deepseek-v4-flash", "mxfp4", "16bit"),
    ("deepseek-v4-flash", "mxfp4", "fp8_group128"),
    ("gpt-oss-120b", "mxfp4", "16bit"),
    ("nemotron-3-super", "nvfp4", "16bit"),
    ("kimi-k2-tp8", "int4_g32", "16bit"),
    ("deepseek-v3-tp8", "fp8_block128", "fp8_group128"),
)
"""Columns and rows of README's table: times of `cuda`."""

PICTURE = ("deepseek-v4-flash", "mxfp4", ("cuda", "triton"))
"""Case, format and backends of README's plot, which shows 16-bit activations."""


TRANSFORMERS, TRANSFORMERS_CASE = "Transformers", "gpt-oss-120b"
"""The peer's name in records of benchmarks/transformers_experts.py, and their case, which has a plot too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One time of another library's kernels for the same case.

    Attributes:
        case, format, activations, tokens, routing: what ran, in the words of :class:`Record`.
        peer, version: the library, and the release that was called.
        median_us: time of one call.
        device, torch, triton, date: where, with what and when.
    """

    case: str
    format: str
    activations: str
    tokens: int
    routing: str
    peer: str
    version: str
    median_us: float
    device: str
    torch: str
    triton: str
    date: str


@dataclass(frozen=True, slots=True)
class Row:
    """What one row of a table of times is about: a case with its weights and activations."""

    case: str
    format: str
    activations: str

    @classmethod
    def of(cls, found: Record | Peer) -> Row:
        """The row of a time."""
        return cls(found.case, found.format, found.activations)

    @property
    def of_peers(self) -> Row:
        """Where its peers are: FP8 activations count as one kind, since peers may scale x otherwise than polymoe."""
        return Row(self.case, self.format, "16bit" if self.activations == "16bit" else "fp8")

    @property
    def head(self) -> str:
        """The row's name; FP8 activations are named where the weights do not imply them."""
        implied = self.activations == "16bit" or self.format.startswith("fp8")
        return f"`{self.case}`, {self.format}" + ("" if implied else f", {self.activations} activations")


def records(*backends: str) -> list[Record]:
    """The newest record of each key, in the files of these backends or in all, with today's floor."""
    paths = [ROOT / "benchmarks" / "results" / RECORDS[name] for name in backends or RECORDS]
    return [with_todays_floor(r) for r in newest(record for path in paths if path.exists() for record in read(path))]


BANDWIDTH_BEFORE = {"h200": 4.3}
"""TB/s in the floors of records that do not name it."""


def faster_memory(device: str, taken: float | None) -> float:
    """Today's bandwidth of a device, relative to the one that a record's floor was taken with."""
    now = DEVICES[device].bandwidth / 1e12 if device in DEVICES else None
    return (now or 1.0) / (taken or BANDWIDTH_BEFORE.get(device) or now or 1.0)


def with_todays_floor(r: Record) -> Record:
    """The record with its floor at today's bandwidth. The floor is the time for memory where it is above the one for
    the operations, which did not change."""
    case = CASES.get(r.case.partition("[")[0])
    faster = faster_memory(r.device, r.bandwidth_tb_s)
    if case is None or faster == 1.0:
        return r
    compute_us = cost(case.problem(r.format, r.activations), DEVICES[r.device], r.tokens).compute_us
    floor_us = max(compute_us, r.floor_us / faster)
    return replace(r, floor_us=round(floor_us, 2), share=round(floor_us / r.median_us, 4))


def best_peers(transformers: bool | None = None) -> dict[Row, dict[int, Peer]]:
    """The fastest peer of each row on an H200, by tokens: of all, or only or without what Transformers packs itself."""
    path = ROOT / "benchmarks" / "results" / PEERS["h200"]
    best: dict[Row, dict[int, Peer]] = {}
    if not path.exists():
        return best
    for peer in read_lines(path, _peer, "a peer's time"):
        if peer is None or peer.routing != "uniform":
            continue
        if transformers is not None and (peer.peer == TRANSFORMERS) != transformers:
            continue
        by = best.setdefault(Row.of(peer).of_peers, {})
        if peer.tokens not in by or peer.median_us < by[peer.tokens].median_us:
            by[peer.tokens] = peer
    return best


def _peer(values: dict[str, Any]) -> Peer | None:
    """A line of the file of peers: a peer's time, or a record of ``bench``, which is ours where no peer is named."""
    if "backend" not in values:
        return read_fields(Peer, values)
    r = read_fields(Record, values)
    if r.peer is None:
        return None
    name = peers_document.LABELS.get(r.peer, r.peer)
    return Peer(
        case=r.case, format=r.format, activations=r.activations, tokens=r.tokens, routing=r.routing, peer=name,
        version=r.version or "", median_us=r.median_us, device=r.device, torch=r.torch, triton=r.triton or "",
        date=r.date,
    )  # fmt: skip


def compared(device: str = "h200") -> dict[peers_document.Row, peers_document.Times]:
    """Peers and this library side by side, and newer records of ours on an H200, all with today's floor."""
    path = ROOT / "benchmarks" / "results" / PEERS[device]
    lines = read_lines(path, lambda v: read_fields(Record, v) if "backend" in v else None, "a peer's time or a record")
    found = [with_todays_floor(r) for r in lines if r is not None]
    newer = records() if device == "h200" else []
    return peers_document.times(device, found, newer, Table((tuple(read_table(SHIPPED)),)))


def by_tokens(found: Sequence[Record], backend: str) -> dict[Row, dict[int, Record]]:
    """A backend's records of named cases with uniform routing, by row and tokens."""
    rows: dict[Row, dict[int, Record]] = {}
    for r in found:
        if r.backend == backend and r.routing == "uniform" and r.case in CASES:
            rows.setdefault(Row.of(r), {})[r.tokens] = r
    return rows


def install() -> str:
    """README's command that installs polymoe."""
    return f"```console\n$ {install_command('transformers')}\n```\n"


EXPLAINED = ("openai/gpt-oss-20b", "rtx4090")
"""Model and device of README's `polymoe explain`."""


def explained() -> str:
    """README's `polymoe explain`: what it prints before its tables. Tables that were tuned here do not count."""
    model, device = EXPLAINED
    with patch.dict(os.environ, {"POLYMOE_CACHE": "/nowhere"}):
        text = str(explain(model, device=device))
    lines = "\n".join(text.splitlines()[:5])
    return f"```console\n$ polymoe explain {model} --device {device} | head -5\n{lines}\n```\n"


def times(found: Sequence[Record], peers: dict[Row, dict[int, Peer]]) -> str:
    """README's table: microseconds of `cuda`, and of the fastest peer in brackets."""
    measured = by_tokens(found, "cuda")

    def cell(row: Row, tokens: int) -> str:
        mine, peer = measured[row].get(tokens), peers.get(row.of_peers, {}).get(tokens)
        if mine is None:
            return ""
        return number(mine.median_us) + (f" ({number(peer.median_us)})" if peer else "")

    cells = []
    for case, form, activations in README_ROWS:
        row = Row(case, form, activations)
        if row in measured:
            cells.append([f"`{case}`", form, activations, *(cell(row, t) for t in README_TOKENS)])
    return markdown(["case", "weights", "activations", *map(str, README_TOKENS)], cells)


def standing(found: Sequence[Record], backend: str, peers: dict[Row, dict[int, Peer]] | None) -> str:
    """A backend's table in docs/performance/: floor, time with its share of the floor, and the fastest peer; times
    alone without ``peers``. Empty without records of this backend."""
    measured = by_tokens(found, backend)
    columns = sorted({t for by in measured.values() for t in by})
    rows = []
    for row, by in measured.items():
        lines = {
            "floor": {t: number(r.floor_us) for t, r in by.items()},
            "time": {t: f"{number(r.median_us)} ({r.share:.2f})" for t, r in by.items()},
            "best peer": {
                t: number(peer.median_us) for t, peer in (peers or {}).get(row.of_peers, {}).items() if t in by
            },
        }
        lines = lines if peers is not None else {"time": lines["time"]}
        heads = iter((row.head,))
        rows += [[next(heads, ""), name, *(line.get(t, "") for t in columns)] for name, line in lines.items() if line]
    return markdown(["case", "us", *map(str, columns)], rows) if rows else ""


def calls(found: Sequence[Record]) -> str:
    """docs/performance/cuda.md's table of calls that differ from the usual ones in one property."""
    by: dict[str, dict[int, Record]] = {}
    case, form, (backend, _) = PICTURE
    for r in found:
        of_case = r.case in (case, f"{case}[batch invariant]")
        if of_case and (r.backend, r.format, r.activations) == (backend, form, "16bit"):
            name = "batch-invariant, uniform routing" if r.case != case else f"{r.routing} routing"
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


OTHERS = {"transformers-packed": "packed by Transformers", "dequantized": "dequantized"}
"""Experts in records of ``bench decode`` beside polymoe's packed ones, and their columns."""


def decode(path: Path) -> str:
    """docs/decoding.md's tables, one a checkpoint: packed experts beside the fastest of each other kind, from newest
    records."""
    if not path.exists():
        return ""
    last: dict[tuple[object, ...], ModelRecord] = {}
    for r in read_lines(path, partial(read_fields, ModelRecord), "a record of bench decode"):
        # Packed experts have one line, whichever backend the plan chose.
        run_by = None if r.experts == "packed" else r.implementation
        key = (r.checkpoint, r.phase, r.batch, r.tokens, r.experts, run_by)
        if key not in last or r.date >= last[key].date:
            last[key] = r
    names = dict.fromkeys(r.checkpoint for r in last.values())
    tables = (_decode_table([r for r in last.values() if r.checkpoint == name]) for name in names)
    return "\n".join(table for table in tables if table)


def _decode_table(found: Sequence[ModelRecord]) -> str:
    """The table of one checkpoint; empty without anything to compare."""
    fastest: dict[tuple[object, ...], dict[str, ModelRecord]] = {}
    for r in sorted(found, key=lambda r: -r.median_us):
        fastest.setdefault((r.phase, r.batch, r.tokens), {})[r.experts] = r
    lines = [by for r in found if len(by := fastest[r.phase, r.batch, r.tokens]) > 1 and by.get("packed") is r]
    others = [experts for experts in OTHERS if any(experts in by for by in lines)]
    if not others:
        return ""
    rows = []
    for by in lines:
        r = by["packed"]
        after = f"decode, batch {r.batch}, after {r.tokens} tokens"
        cells = [after if r.phase == "decode" else f"prefill of {r.tokens} tokens, {r.attention}", _speed(r)]
        for other in others:
            ratio = f"{r.tokens_per_second / by[other].tokens_per_second:.2f}" if other in by else ""
            cells += [_speed(by[other]) if other in by else "", ratio]
        shares = [_share(by[experts]) if experts in by else None for experts in ("packed", *others)]
        rows.append([*cells, *("" if share is None else f"{share:.2f}" for share in shares)])
    newest = {experts: max((by[experts] for by in lines if experts in by), key=lambda r: r.date)
              for experts in ("packed", *others)}  # fmt: skip
    r = newest["packed"]
    weights = ["weights, once loaded", f"{r.weight_bytes / 1e9:.1f} GB"]
    for other in others:
        held = newest[other].weight_bytes
        weights += [f"{held / 1e9:.1f} GB", f"{r.weight_bytes / held:.2f}"]
    rows.append([*weights, *[""] * (1 + len(others))])
    header = [f"{r.checkpoint}, {r.device}", "packed, tokens/s"]
    header += [name for other in others for name in (f"{OTHERS[other]}, tokens/s", "ratio")]
    header += ["share of floor, packed", *(OTHERS[other] for other in others)]
    provenance = f"torch {r.torch}, transformers {r.transformers}, triton {r.triton}, polymoe {r.commit}, {r.date[:10]}"
    return f"{markdown(header, rows)}\n`{r.command}`: {provenance}.\n"


def _share(r: ModelRecord) -> float | None:
    """The share of the floor at today's bandwidth; a step's floor is the time for memory alone."""
    return None if r.share is None else r.share / faster_memory(r.device, r.bandwidth_tb_s)


def _speed(r: ModelRecord) -> str:
    plain = r.phase == "decode" and not r.graphs
    return f"{r.tokens_per_second:,.0f} ({r.implementation}{', no graph' if plain else ''})"


def serve(path: Path) -> str:
    """docs/serving.md's tables: the newest records of each pair of input and output lengths."""
    if not path.exists():
        return ""
    newest: dict[tuple[object, ...], dict[int, serving.ServingRecord]] = {}
    for r in sorted(read_lines(path, _serving_record, "a record of bench serve"), key=lambda r: r.date):
        newest.setdefault((r.label, r.model, r.device, r.input_len, r.output_len), {})[r.batch_size] = r
    return "\n".join(_serving_table([rows[size] for size in sorted(rows)]) for rows in newest.values())


def _serving_record(values: dict[str, Any]) -> serving.ServingRecord:
    """A record, without fields that older ones have beside these."""
    given = {field.name: values[field.name] for field in fields(serving.ServingRecord)}
    times = {name: Percentiles(**given[name]) for name in ("latency_us", "ttft_us", "itl_us") if given[name]}
    return serving.ServingRecord(**{**given, **times})


def _serving_table(rows: Sequence[serving.ServingRecord]) -> str:
    found = report.columns(rows)
    lines = [f"**{report.title(rows[0])}**", "", "| " + " | ".join(heading for heading, _ in found) + " |"]
    lines.append("|" + " ---: |" * len(found))
    lines += ["| " + " | ".join(row) + " |" for row in zip(*(cells for _, cells in found), strict=True)]
    if notes := report.remarks(rows):
        lines += ["", *(f"- {note}" for note in notes)]
    for command, r in {r.command: r for r in rows}.items():
        lines += ["", f"`{command}`, polymoe {r.commit}, {r.date}"]
    return "\n".join([*lines, ""])


def attacks(path: Path) -> str:
    """docs/security.md's tables: verdicts of each verb in the newest campaign, and the newest attack on a server."""
    if not path.exists():
        return "There is no record yet.\n"
    runs = sorted(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda run: run["date"])
    run = [run for run in runs if "verdicts" in run][-1]
    verdicts = dict.fromkeys(["same", "answered", "refused", *(name for of in run["verdicts"].values() for name in of)])
    rows = [[verb, *(str(of.get(name, 0)) for name in verdicts)] for verb, of in run["verdicts"].items()]
    counts = (
        f"{run['mutated_checkpoints']:,} changed checkpoints, {run['cases']:,} cases, "
        f"{run['failures']} failures, at most {run['slowest_s']:.1f} s"
    )
    text = f"{markdown(['', *verdicts], rows)}\n{_command(run)}: {counts}. {_versions(run)}.\n"
    return text + "".join(map(_attacked_server, [run for run in runs if "server" in run][-1:]))


def _attacked_server(run: dict[str, Any]) -> str:
    (low, high), descriptors = run["resident_mb"], run["descriptors"]
    answers = ", ".join(f"{count:,} {name}" for name, count in run["answers"].items())
    rows = [
        ["`/health`, ms: median, 99 %, longest", " / ".join(f"{1e3 * run[f'health_{name}_s']:.0f}" for name in
            ("median", "p99", "longest"))],
        ["longest without waiting for a processor, ms", f"{1e3 * run['served_longest_s']:.0f}"],
        ["`/health` without an answer", f"{len(run['failed'])} of {run['health']:,}"],
        ["sums asked meanwhile", answers],
        ["memory, MB", f"{low:,} to {high:,}"],
        ["memory, last fifth of the time over the second", f"{run['resident_growth']:.2f}"],
        ["descriptors, of 4,096", f"{descriptors[0]:,} to {descriptors[1]:,}"],
        ["end after SIGTERM, s", f"{run['stopped_s'] - run['stop_waited_s']:.1f}"],
    ]  # fmt: skip
    head = [f"{len(run['server'])} attacks, {run['clients']} clients, {run['seconds']:g} s", ""]
    return f"\n{markdown(head, rows)}\n{_command(run)}: {_versions(run)}.\n"


def _command(run: dict[str, Any]) -> str:
    return f"`{run['command']}`" + (f", beside {run['beside']}" if "beside" in run else "")


def _versions(run: dict[str, Any]) -> str:
    names = ", ".join(f"{name} {run[name]}" for name in ("torch", "transformers"))
    return f"Python {run['python']}, {names}, polymoe {run['commit']}, {run['date'][:10]}"


def number(time_us: float) -> str:
    """Three significant digits, or every digit before the point."""
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


def transformers_tests(path: Path) -> str:
    """docs/engines/transformers.md's table: the newest record of each model type."""
    found = {run["model_type"]: run for run in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    rows = []
    for run in found.values():
        lost = {**run["refused"], **dict.fromkeys(run["crashed"].values(), 1)}
        why = "; ".join(f"{count}: {reason}" for reason, count in lost.items()) or "none"
        rows.append([f"`{run['model_type']}`", str(run["without"]), str(run["with"]), why])
    *_, run = found.values()
    head = ["model type", "pass without polymoe", "with it", "lost, and why"]
    versions = f"Transformers {run['transformers']}, torch {run['torch']}"
    return f"{markdown(head, rows)}\n`{run['command']}`: {versions}, {run['date']}.\n"


def models(path: Path) -> str:
    """docs/models.md, which needs Transformers; without it, the document that exists."""
    try:
        from models_document import models_document
    except ImportError:
        return path.read_text(encoding="utf-8")
    return models_document(path)


def documents() -> dict[Path, str]:
    """Each file as it should be."""
    docs, results, peers = ROOT / "docs", ROOT / "benchmarks" / "results", best_peers()
    of_cuda, (named, untuned) = records("cuda"), peers_document.by_case(compared())
    h100 = compared("h100")
    tables = {
        ROOT / "README.md": {"install": install(), "explain": explained(), "times": times(records(), peers)},
        docs / "performance" / "triton.md": {"times": standing(records("triton"), "triton", None)},
        docs / "performance" / "cuda.md": {"times": standing(of_cuda, "cuda", peers), "calls": calls(of_cuda)},
        docs / "performance" / "peers.md": {
            "ratios": peers_document.ratios(named),
            "untuned": peers_document.ratios(untuned),
            "h100": peers_document.ratios(h100),
            "h100 many rows": peers_document.many_rows(h100),
        },
        docs / "decoding.md": {"decode": decode(results / DECODE)},
        docs / "serving.md": {"serve": serve(results / SERVE)},
        docs / "scale.md": {"experts": scale.table(scale.MODELS[0]), "deployments": scale.deployments()},
        docs / "security.md": {"attacks": attacks(results / ATTACKS)},
        docs / "engines" / "transformers.md": {"tests": transformers_tests(results / TRANSFORMERS_TESTS)},
    }
    for engine, file in ENGINES.items():
        tables[docs / "engines" / f"{engine.lower()}.md"] = {
            "answers": engines_document.answers(results / file, engine),
            "speed": engines_document.speed(results / file, engine),
            "steps": engines_document.steps(results / file, engine),
            "loading": engines_document.loading(results / file, engine),
        }
    ran = versions_document.ran()
    tables[docs / "install.md"] = {"versions": versions_document.table(ran)}
    texts = {
        docs / "backends.md": backends_document(),
        docs / "models.md": models(docs / "models.md"),
        docs / "performance" / "plots.md": peers_document.plots(named),
        ROOT / "src" / "polymoe" / "doctor" / "ran.json": versions_document.packaged(ran),
        **{
            ROOT / "constraints" / f"{name}.txt": versions_document.constraints(ran, name)
            for name in versions_document.CONSTRAINTS
        },
    }
    for path, parts in tables.items():
        text = path.read_text(encoding="utf-8")
        for name, part in parts.items():
            text = between(text, name, part)
        texts[path] = text
    return texts


def picture(case: str, path: Path) -> None:
    """Draw the plot of a case: shares of the floor over tokens. Not part of --check, since the bytes of a PNG depend on
    the version of matplotlib."""
    _, form, backends = PICTURE
    found = [r for r in records() if (r.case, r.format, r.activations) == (case, form, "16bit")]
    found = [r for r in found if r.routing == "uniform" and r.backend in backends]
    floors = {r.tokens: r.floor_us for r in found}
    lines = {}
    for own in (False, True):
        peers = {t: p for t, p in best_peers(own).get(Row(case, form, "16bit"), {}).items() if t in floors}
        if peers:
            names = ", ".join(sorted({peer.peer.split()[0] for peer in peers.values()}))
            label = "packed by Transformers" if own else f"fastest peer: {names}"
            lines[label] = [(t, floors[t] / peers[t].median_us) for t in sorted(peers)]
    plot(sorted(found, key=lambda r: r.backend), path, lines)


BARS = (1, 16, 64, 256)
"""Token counts of README's picture: batches of decoding."""


def bars() -> list[tuple[int, float, float]]:
    """README's picture: tokens, microseconds of polymoe, and of the fastest other library."""
    row = Row(TRANSFORMERS_CASE, "mxfp4", "16bit")
    mine, peers = by_tokens(records(), "cuda")[row], best_peers()[row]
    return [(t, mine[t].median_us, peers[t].median_us) for t in BARS]


def times_picture(path: Path) -> None:
    """Draw them. Letters are large: on a telephone the picture is 390 pixels wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.4), layout="constrained")
    axes = figure.subplots()
    rows = bars()
    for offset, name, color in ((-0.2, "polymoe", "#3949ab"), (0.2, "fastest other library", "#b0bec5")):
        times = [row[1 if name == "polymoe" else 2] for row in rows]
        places = [i + offset for i in range(len(rows))]
        drawn = axes.barh(places, times, height=0.38, color=color, label=name)
        axes.bar_label(drawn, [f"{time:.0f} µs" for time in times], padding=5, fontsize=19)
    axes.set_yticks(range(len(rows)), [str(tokens) for tokens, *_ in rows], fontsize=19)
    axes.set_ylabel("requests in the batch", fontsize=19)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(max(row[1:]) for row in rows))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title("One gpt-oss-120b layer on an H200", fontsize=21, loc="left")
    axes.legend(fontsize=18, loc="upper right", frameon=False)
    write_png(figure, path)


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
        sys.exit(f"{names}: differs from code and records; run python benchmarks/write_docs.py")
    for path, text in stale.items():
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text)
    if options.picture:
        times_picture(ROOT / "docs" / "performance" / "gpt-oss-120b-h200-times.png")
        for case in (PICTURE[0], TRANSFORMERS_CASE):
            picture(case, ROOT / "docs" / "performance" / f"{case}-h200.png")
        named, _ = peers_document.by_case(compared())
        peers_document.pictures(named, ROOT / "docs" / "performance" / "plots")
        peers_document.rates_picture(compared("h100"), "h100", ROOT / "docs" / "performance" / "many-rows-h100.png")
        for engine, file in ENGINES.items():
            png = ROOT / "docs" / "engines" / f"{engine.lower()}-h200.png"
            engines_document.picture(ROOT / "benchmarks" / "results" / file, engine, png)
        slots = newest(read(ROOT / "benchmarks" / "results" / "slots-h100.jsonl"))
        slots_plot.plot(slots, ROOT / "docs" / "offloading-h100.png")
        records = ROOT / "benchmarks" / "results" / "vllm-h100.jsonl"
        engines_document.serving_picture(records, "vLLM", ROOT / "docs" / "engines" / "vllm-serve-h100.png")


if __name__ == "__main__":
    main()
