"""What benchmarks/write_docs.py writes: current in the tree, and true to verdicts and records."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path

import backends_document  # type: ignore
import pytest
import write_docs  # type: ignore

from polymoe.backends import BACKENDS
from polymoe.backends.cost import cost
from polymoe.bench.cases import CASES
from polymoe.bench.records import Record
from polymoe.machine import DEVICES


def test_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed or tuned here. If it is not: python benchmarks/write_docs.py."""
    monkeypatch.setattr("polymoe.machine.machine._version", lambda name: None)
    monkeypatch.setenv("POLYMOE_CACHE", "/nowhere")
    documents = write_docs.documents()
    for path, text in documents.items():
        assert path.read_text(encoding="utf-8") == text, path


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


def test_check_names_what_is_not_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is written by --check; without it the file is written, and then it is current."""
    # Which take seconds.
    monkeypatch.setattr(write_docs, "backends_document", lambda: "what backends say\n")
    monkeypatch.setattr(write_docs, "models", lambda path: path.read_text(encoding="utf-8"))
    monkeypatch.setattr(write_docs, "compared", cache(write_docs.compared))
    documents = [str(path.relative_to(write_docs.ROOT)) for path in write_docs.documents()]
    documents.remove("docs/backends.md")
    names = (
        *write_docs.RECORDS.values(), *write_docs.PEERS.values(), *write_docs.ENGINES.values(),
        write_docs.DECODE, write_docs.SERVE, write_docs.ATTACKS, write_docs.TRANSFORMERS_TESTS,
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
