"""How far backends are proven: the shipped rows, what a verdict says of them, and what `auto` makes of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import write_proof  # type: ignore[import-not-found]

import polymoe
from polymoe.backends import BACKENDS
from polymoe.backends.reference import Reference
from polymoe.bench.cases import CASES
from polymoe.bench.records import append, read
from polymoe.common import plugins
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS as SHIPPED_LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Measured, Table, problem_key
from polymoe.planning.proof import Proof, Proofs, ProofStatus, parse, weakest
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.verdict import Accepted, Verdict
from support import table_rows
from support.problems import problem_of, random_call, random_experts
from support.proven import Plugin, Recorder
from support.table_rows import proof
from support.toys import LAYOUTS, Toy

H200 = Machine(DEVICES["h200"], {"triton": "3.6.0"}, (13, 0))
PROBLEM = problem_of(random_experts())
MODELS = Path(__file__).parents[2] / "models"


class TestRows:
    def test_shipped_rows_follow_from_the_results(self) -> None:
        """If they do not: python benchmarks/write_proof.py."""
        assert write_proof.TARGET.read_text(encoding="utf-8") == write_proof.text(write_proof.proofs())

    def test_shipped_rows_name_what_there_is(self) -> None:
        for row in parse(write_proof.TARGET.read_text(encoding="utf-8")):
            assert row.backend in BACKENDS
            assert row.format.removesuffix("_zp") in FORMATS  # with zero points, as AWQ and GPTQ have them
            assert row.device in DEVICES
            assert (write_proof.ROOT / "benchmarks/results" / row.source).is_file()

    def test_a_measurement_counts_more_than_a_run_and_a_failed_test_refutes(self, tmp_path: Path) -> None:
        records = read(write_proof.ROOT / "benchmarks/results/cuda-h200.jsonl")
        found = [r for r in records if (r.case, r.backend, r.activations) == ("deepseek-v4-flash", "cuda", "16bit")]
        found = [r for r in found if r.format == "mxfp4"]
        append(tmp_path / "cuda-h200.jsonl", next(r for r in found[::-1] if r.tokens == 4))
        cell = {"backend": "cuda", "format": "mxfp4", "activations": "16bit", "device": "h200"}
        stamp = {"test": "t.py", "torch": "2", "triton": None, "commit": "abc", "date": "2027-01-01T00:00:00Z"}
        lines = [
            {**cell, **stamp, "family": "w4a16_mma_ordered", "passed": True},
            {**cell, **stamp, "family": "w4a16_wgmma", "passed": True},
            {**cell, **stamp, "family": "w4a8", "passed": True},
            {**cell, **stamp, "family": "w4a8", "passed": False},
        ]
        (tmp_path / "run-h200.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        statuses = {(p.backend, p.family): (p.status, p.source) for p in write_proof.proofs(tmp_path)}
        assert statuses == {
            ("cuda", "w4a16_mma_ordered"): ("measured", "cuda-h200.jsonl"),
            ("cuda", "w4a16_wgmma"): ("run", "run-h200.jsonl"),
            ("reference", ""): ("run", "cuda-h200.jsonl"),
        }

    def test_a_record_that_says_its_family_is_believed(self, tmp_path: Path) -> None:
        source = read(write_proof.ROOT / "benchmarks/results/triton-h200.jsonl")[0]
        append(tmp_path / "triton-h200.jsonl", replace(source, family="grouped_gemm_short_k", device="another"))
        append(tmp_path / "triton-h200.jsonl", replace(source, device="yet another"))  # says none, and no plan is known
        triton = [p for p in write_proof.proofs(tmp_path) if p.backend == "triton"]
        assert [(p.family, p.device) for p in triton] == [("grouped_gemm_short_k", "another")]

    @pytest.mark.parametrize("line", ["{}", "[1]", "no JSON", json.dumps(dict.fromkeys(Proof.__slots__, "unrun"))])
    def test_a_line_that_is_none(self, line: str) -> None:
        with pytest.raises(ValueError, match=r"proof|Expecting value"):
            parse(line)


class TestStatus:
    def test_belongs_to_all_five(self) -> None:
        found = Proofs([proof("fast", "measured", family="f")])
        assert found.status("fast", "f", PROBLEM, H200.device) == "measured"
        assert found.status("other", "f", PROBLEM, H200.device) == "unrun"
        assert found.status("fast", "g", PROBLEM, H200.device) == "unrun"
        assert found.status("fast", "f", replace(PROBLEM, activations="fp8_token"), H200.device) == "unrun"
        assert found.status("fast", "f", problem_of(random_experts("nvfp4")), H200.device) == "unrun"
        assert found.status("fast", "f", PROBLEM, DEVICES["h100"]) == "unrun"

    def test_the_strongest_of_one_cell_counts(self) -> None:
        rows = [proof("fast", "measured"), proof("fast", "run")]
        for order in (rows, rows[::-1]):
            assert Proofs(order).status("fast", "", PROBLEM, H200.device) == "measured"

    def test_a_cpu_counts_as_run(self) -> None:
        assert Proofs().status("fast", "f", PROBLEM, DEVICES["cpu"]) == "run"

    def test_projections_in_two_formats_are_as_far_as_the_weaker_one(self) -> None:
        mixed = replace(PROBLEM, spec=replace(PROBLEM.spec, down=FORMATS["nvfp4"].encoding))
        rows = [proof("fast", "measured"), proof("fast", "measured", format="nvfp4")]
        assert Proofs(rows[:1]).status("fast", "", mixed, H200.device) == "unrun"
        assert Proofs(rows).status("fast", "", mixed, H200.device) == "run"

    def test_weakest(self) -> None:
        assert weakest(["measured", "run"]) == "run"
        assert weakest(["run", "unrun", "measured"]) == "unrun"
        assert weakest(["measured"]) == "measured"
        assert weakest([]) == "unrun"

    @pytest.mark.parametrize("gpu", ["a100", "rtx4090", "b200", "rtx5090"])
    def test_triton_is_unrun_where_it_never_ran(self, gpu: str) -> None:
        machine = replace(H200, device=DEVICES[gpu])
        selection = select(CASES["gpt-oss-20b"].problem(), machine, table=Table())
        assert set(selection.proofs) == {"unrun"}
        assert f"triton: accepted (CUDA graphs, never tested on {gpu})" in str(selection)
        assert f" was never tested on {gpu}: `polymoe verify" in selection.summary()

    def test_an_h100_is_not_an_h200(self) -> None:
        """Tests passed on an H100 too, but times are an H200's."""
        selection = select(CASES["deepseek-v4-flash"].problem(), replace(H200, device=DEVICES["h100"]), table=Table())
        assert {step.backend for step in selection.require().steps} == {"cuda"}
        assert set(selection.proofs) == {"run"}
        assert "measured" in select(CASES["deepseek-v4-flash"].problem(), H200, table=Table()).proofs

    @pytest.mark.parametrize("case", list(CASES))
    def test_every_case_is_proven_on_an_h200(self, case: str) -> None:
        selection = select(CASES[case].problem(), H200, table=Table())
        assert set(selection.proofs) <= {"measured", "run"}
        assert "never tested" not in selection.summary()

    def test_families_of_the_cuda_backend(self) -> None:
        selection = select(CASES["deepseek-v4-flash"].problem(), H200, table=Table())
        steps = selection.to_dict()["plan"]["steps"]
        assert {step["family"] for step in steps} == {"w4a16_mma_ordered", "w4a16_wgmma"}
        assert {step["proof"] for step in steps} == {"measured"}
        cuda = next(c for c in selection.to_dict()["candidates"] if c["backend"] == "cuda")
        assert (cuda["proof"], cuda["proofs"]) == (
            "measured",
            {"w4a16_mma_ordered": "measured", "w4a16_wgmma": "measured"},
        )


@dataclass(frozen=True)
class Foreign(Toy):
    """Of another library."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        return Accepted(foreign=True, max_tokens=self.max_tokens)


def chosen(proofs: list[Proof], *toys: Toy, backend: str = "auto", table: Table | None = None) -> Selection:
    return select(
        PROBLEM,
        H200,
        backend=backend,
        backends={toy.name: toy for toy in toys},
        layouts=LAYOUTS,
        table=table or Table(),
        proofs=Proofs(proofs),
    )


def backends_of(selection: Selection) -> list[str]:
    return list(dict.fromkeys(step.backend for step in selection.require().steps))


class TestAuto:
    SLOW, FAST = Toy("slow", times_floor=9.0), Toy("fast")

    @pytest.mark.parametrize("statuses", [("run", "measured"), ("measured", "run"), ("unrun", "unrun")])
    def test_time_decides_between_measured_and_run(self, statuses: tuple[ProofStatus, ProofStatus]) -> None:
        rows = [proof(n, s) for n, s in zip(("slow", "fast"), statuses, strict=True) if s != "unrun"]
        assert backends_of(chosen(rows, self.SLOW, self.FAST)) == ["fast"]

    def test_what_is_unrun_is_taken_where_nothing_better_accepts(self) -> None:
        rows = [proof("slow")]
        assert backends_of(chosen(rows, self.SLOW, self.FAST)) == ["slow"]
        assert backends_of(chosen(rows, replace(self.SLOW, max_tokens=63), self.FAST)) == ["slow", "fast"]
        selection = chosen(rows, replace(self.SLOW, max_tokens=63), self.FAST)
        assert selection.proofs == ("run", "unrun", "unrun")
        assert "fast was never tested on h200: `polymoe verify MODEL` does it there, and" in str(selection)

    def test_a_layout_whose_reader_is_proven_goes_before_a_faster_one(self) -> None:
        elsewhere = replace(self.FAST, layouts=("natural",))
        assert chosen([proof("slow")], self.SLOW, elsewhere).require().layout == "flipped"
        assert chosen([], self.SLOW, elsewhere).require().layout == "natural"

    def test_a_backend_that_is_named_may_be_unrun(self) -> None:
        assert backends_of(chosen([proof("slow")], self.SLOW, self.FAST, backend="fast")) == ["fast"]

    def test_tuned_here_is_measured(self) -> None:
        table = Table(((row("fast", 16),),))
        assert backends_of(chosen([proof("slow")], self.SLOW, self.FAST, table=table)) == ["fast", "slow"]


def row(backend: str, tokens: int, median_us: float = 1.0) -> Measured:
    return table_rows.row(tokens, median_us, backend=backend, problem=problem_key(PROBLEM), config={"tile": 16})


class TestForeign:
    OURS, THEIRS = Toy("ours", times_floor=9.0), Foreign("theirs", times_floor=1.1)

    def test_not_without_a_measurement_of_this_machine(self) -> None:
        rows = [proof("ours"), proof("theirs", "measured")]
        for table in (Table(), Table(((), (row("theirs", 16),)))):  # none, and one that was shipped
            selection = chosen(rows, self.OURS, self.THEIRS, table=table)
            assert backends_of(selection) == ["ours"]
            assert "another library's kernels: auto uses them only if `polymoe tune` measured them" in str(selection)
        assert chosen(rows, self.THEIRS).plan is None
        assert backends_of(chosen(rows, self.OURS, self.THEIRS, backend="theirs")) == ["theirs"]

    def test_where_it_was_measured_faster(self) -> None:
        table = Table((tuple(row("theirs", tokens, 1e-3) for tokens in (8, 16)),))
        selection = chosen([proof("ours")], self.OURS, self.THEIRS, table=table)
        assert [(tokens, step.backend) for tokens, step in selection.require().ranges()] == [
            ("1", "ours"),
            ("2-16", "theirs"),
            ("17-512", "ours"),
            ("513+", "ours"),
        ]
        said = "theirs runs another library's kernels, chosen because it was measured faster on this machine"
        assert said in selection.summary()

    def test_what_another_package_registers_is_foreign_whatever_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Foreign, "check", Toy.check)  # says nothing of being foreign
        assert chosen([], self.THEIRS).plan is not None
        monkeypatch.setattr(plugins, "_found", [plugins.Plugin("theirs", backends=(self.THEIRS,))])
        assert chosen([], self.THEIRS).plan is None
        assert chosen([], self.THEIRS, backend="theirs").plan is not None

    def test_the_largest_calls_that_were_measured_stand_for_larger_ones(self) -> None:
        """A layout that only foreign backends read has no other plan."""
        measured = tuple(row("theirs", tokens, 1e-3) for tokens in (1, 4, 16, 64, 256, 1024, 4096, 16384))
        table = Table((measured,))
        selection = chosen([proof("ours")], self.OURS, self.THEIRS, table=table)
        steps = [(tokens, step.backend) for tokens, step in selection.require().ranges()]
        assert steps == [("1+", "theirs")]
        assert backends_of(chosen([], self.THEIRS, table=table)) == ["theirs"]
        few, small = replace(self.OURS, max_tokens=63), Table((measured[:-2],))
        assert chosen([], few, self.THEIRS, table=small).plan is None
        alone = chosen([], self.THEIRS, backend="theirs", table=table)
        assert alone.require().steps[-1].max_tokens is None

    def test_not_where_it_was_measured_slower(self) -> None:
        table = Table(((row("theirs", 8, 1e6), row("theirs", 16, 1e6)),))
        assert backends_of(chosen([proof("ours")], self.OURS, self.THEIRS, table=table)) == ["ours"]


class TestReports:
    """What ``polymoe verify --out`` and ``polymoe bench kernels --out`` write becomes a status."""

    def test_a_report_makes_cells_run_and_measured(self, tmp_path: Path) -> None:
        line = {
            "backend": "triton", "family": "grouped_gemm", "format": "mxfp4", "activations": "16bit",
            "device": "rtx5090", "test": "polymoe verify x", "passed": True, "torch": "2",
            "triton": "3.8.0", "commit": "a", "date": "2027",
        }  # fmt: skip
        source = read(write_proof.ROOT / "benchmarks/results/triton-h200.jsonl")[0]
        record = asdict(replace(source, device="rtx5090", family="grouped_gemm_short_k"))
        report = tmp_path / "issue.txt"
        lines = [
            line,
            line,
            {**line, "format": "nvfp4", "passed": False},
            record,
            {**record, "backend": "torch-dequantized"},
        ]
        report.write_text("GPU: RTX 5090\n  table\n" + "".join(json.dumps(x) + "\n" for x in lines))
        assert write_proof.add(report, tmp_path) == ["run-rtx5090.jsonl", "triton-rtx5090.jsonl"]
        assert write_proof.add(report, tmp_path)  # and nothing twice
        assert len((tmp_path / "run-rtx5090.jsonl").read_text().splitlines()) == 2
        found = {(p.backend, p.family, p.status) for p in write_proof.proofs(tmp_path)}
        assert found == {
            ("triton", "grouped_gemm", "run"), ("triton", "grouped_gemm_short_k", "measured"), ("reference", "", "run"),
        }  # fmt: skip

    def test_lines_that_are_none(self, tmp_path: Path) -> None:
        report = tmp_path / "issue.txt"
        report.write_text('{"passed": true}\n')
        with pytest.raises(ValueError, match="backend: expected a value, got none"):
            write_proof.add(report, tmp_path)
        assert list(tmp_path.iterdir()) == [report]

    def test_verify_writes_what_ran(self, cli: Any, tmp_path: Path) -> None:
        file, sums = tmp_path / "record.jsonl", MODELS / "sums-gpt-oss-mxfp4"
        code, out, _ = cli("verify", sums, "--layer", 1, "--tokens", "1,3", "--device", "cpu", "--out", file)
        assert (code, "all good" in out) == (0, True)
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        line = next(x for x in lines if x["backend"] == "reference")
        assert (line["format"], line["activations"]) == ("mxfp4", "16bit")
        assert (line["device"], line["test"], line["passed"]) == ("cpu", "polymoe verify sums-gpt-oss-mxfp4", True)
        with pytest.raises(SystemExit, match="cpu is no GPU of DEVICES"):
            write_proof.add(file, tmp_path)
        assert cli("verify", sums, "--out", tmp_path / "no" / "record.jsonl")[0] == 2


class TestRecorder:
    """The plugin behind ``scripts/test-gpu``, on calls of the reference on a CPU."""

    def noted(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> Recorder:
        recorder = Recorder(kind)
        recorder.watch({"reference": Reference()}, monkeypatch)
        weights = random_experts("nvfp4")
        x, routing = random_call(3, 64, 5)
        packed = SHIPPED_LAYOUTS["natural"].pack(weights, torch.device("cpu"))
        problem, out = problem_of(weights), torch.empty_like(x)
        runner = Reference().bind(problem, packed)
        assert runner.options == Reference().bind(problem, packed).options
        runner.run(CallArguments(x, *routing, out), Reference().configure(problem, Machine.of("cpu"), 3))
        assert bool(out.isfinite().all())
        return recorder

    def test_notes_calls_on_its_kind_of_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.noted(monkeypatch, "cpu").cells == {("reference", "", "nvfp4", "16bit")}

    def test_and_no_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.noted(monkeypatch, "cuda").cells == set()

    def test_lines_are_what_the_generator_reads(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("POLYMOE_TEST_COMMIT", "abc")
        plugin = Plugin(tmp_path / "run-cpu.jsonl", self.noted(monkeypatch, "cpu"))
        for passed in (True, True):  # the second says nothing new
            plugin.write("tests/backends/test_x.py", passed)
        assert [(p.backend, p.status, p.device, p.commit) for p in write_proof.proofs(tmp_path)] == [
            ("reference", "run", "cpu", "abc")
        ]
        plugin.write("tests/backends/test_x.py", False)
        assert write_proof.proofs(tmp_path) == []

    @pytest.mark.parametrize(
        ("node", "marks", "error", "lines"),
        [
            ("tests/backends/test_x.py::test", ("gpu",), None, [True]),
            ("tests/backends/test_x.py::test", ("gpu",), AssertionError, [False]),
            ("tests/backends/test_x.py::test", ("gpu",), pytest.skip.Exception, []),
            ("tests/backends/test_x.py::test", (), None, []),
            ("tests/gpu/test_x.py::test", ("gpu", "slow"), AssertionError, []),
            ("tests/bench/test_x.py::test", ("gpu",), None, []),
        ],
    )
    def test_what_counts(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        node: str,
        marks: tuple[str, ...],
        error: Any,
        lines: list[bool],
    ) -> None:
        recorder = self.noted(monkeypatch, "cpu")
        cells = set(recorder.cells)
        plugin = Plugin(tmp_path / "run.jsonl", recorder)
        item: Any = SimpleNamespace(nodeid=node, keywords=dict.fromkeys(marks, True))
        hook = plugin.pytest_runtest_call(item)
        next(hook)
        assert recorder.cells == set()  # those of the test before
        recorder.cells.update(cells)
        with pytest.raises(StopIteration):
            hook.send(SimpleNamespace(excinfo=error and (error, error(), None)))
        written = (tmp_path / "run.jsonl").read_text().splitlines() if lines else []
        assert [json.loads(line)["passed"] for line in written] == lines
        assert (tmp_path / "run.jsonl").exists() == bool(lines)


def test_explain_says_it(cli: Any) -> None:
    path = MODELS / "sums-gpt-oss-mxfp4"
    code, out, _ = cli("explain", path, "--device", "b200")
    assert code == 0
    assert "never tested on b200" in " ".join(out.split())
    assert "floor" in out
    code, out, _ = cli("explain", path, "--device", "h200", "--json")
    (row,) = json.loads(out)["rows"]
    assert {step["proof"] for step in row["plan"]["steps"]} == {"measured"}
    assert "timed on h200" in str(polymoe.explain(path, device="h200"))
