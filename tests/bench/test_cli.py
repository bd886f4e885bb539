"""``polymoe bench``: tables, JSON, records, bad input, an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polymoe.backends import BACKENDS
from polymoe.backends.reference import ReferenceRunner
from polymoe.bench import slots
from polymoe.bench.peers import PEERS
from polymoe.bench.records import read

SUMS = Path(__file__).parent.parent.parent / "models" / "sums-gpt-oss-mxfp4"
SMALL = ("--case", "deepseek-v4-flash", "--experts", 4, "--hidden", 64, "--intermediate", 32, "--device", "cpu")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(cli: Cli) -> Cli:
    """Runs ``polymoe bench`` in this process: exit code, stdout, stderr."""
    return lambda *args: cli("bench", *args)


def test_a_table_and_records(bench: Cli, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    code, stdout, stderr = bench(*SMALL, "--tokens", "1,8", "--out", out, "--commit", "abc")
    assert code == 0
    for text in ("deepseek-v4-flash[H=64, F=32, E=4]", "reference", "torch-dequantized", "median", "share", "calls"):
        assert text in stdout
    assert "nominal rates" in stderr
    records = read(out)
    assert len(records) == 6
    assert {r.commit for r in records} == {"abc"}
    assert records[0].command.startswith("polymoe bench --case deepseek-v4-flash --experts 4")
    assert bench(*SMALL, "--tokens", "16", "--backend", "reference", "--out", out)[0] == 0
    assert len(read(out)) == 7


def test_json_of_a_checkpoints_layer(bench: Cli, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[[0, 1, 2], [7, 6, 5]]")
    code, stdout, _ = bench(
        "--checkpoint", SUMS, "--layer", 1, "--tokens", "3", "--device", "cpu", "--backends", "reference", "--json",
        "--routing", tmp_path / "ids.json",
    )  # fmt: skip
    (row,) = json.loads(stdout)
    assert code == 0
    assert (row["case"], row["routing"], row["tokens"]) == ("sums-gpt-oss-mxfp4:layer1", "file:ids.json", 3)
    assert 0 < row["error"] < 6e-3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*SMALL, "--energy"), "expected a GPU, got cpu"),
        (("--checkpoint", "no/such/checkpoint"), "no/such/checkpoint"),
    ],
)
def test_refusals_come_before_any_timing(
    bench: Cli, monkeypatch: pytest.MonkeyPatch, args: tuple[object, ...], message: str
) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("ran")

    monkeypatch.setattr(ReferenceRunner, "run", run)
    code, stdout, stderr = bench(*args)
    assert (code, stdout) == (1 if "no/such/checkpoint" in args else 2, "")
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--case", "kimi-k2", "--checkpoint", SUMS),
        ("--case", "kimi-k2", "--layer", 1),
        ("--checkpoint", SUMS, "--no-bias"),
        (*SMALL, "--misses", "0"),
        (*SMALL, "--slots", 3, "--peers", "vllm"),
    ],
)
def test_wrong_usage_exits_with_2(bench: Cli, args: tuple[object, ...]) -> None:
    assert bench(*args)[:2] == (2, "")


def test_a_token_misses_by_default_at_most_its_experts(bench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight, as in Mixtral."""
    asked: list[Any] = []
    monkeypatch.setattr(slots, "slot_rows", lambda *given: asked.append(given[2]) or iter(()))
    assert bench("--checkpoint", SUMS, "--device", "cpu", "--slots", 4)[0] == 0
    assert asked == [(0, 1, 2)]


def test_the_help_names_every_peer(bench: Cli) -> None:
    text = " ".join(bench("kernels", "--help")[1].split())
    assert [name for name in PEERS if f" {name}," not in text and f" {name}." not in text] == []


def test_batch_invariant_results_are_nothing_for_a_cpu(bench: Cli) -> None:
    code, stdout, stderr = bench(*SMALL, "--tokens", "1", "--batch-invariant")
    assert code == 0
    assert "deepseek-v4-flash[H=64, F=32, E=4][batch invariant]" in stdout
    lacking = [name for name, backend in BACKENDS.items() if "batch_invariant" not in backend.handles]
    assert stdout.count("batch-invariant results: not supported") == len([*lacking, "the baseline"])
    code, _, stderr = bench(*SMALL, "--tokens", "1", "--batch-invariant", "--backends", "reference")
    assert (code, "batch-invariant results" in stderr) == (1, True)


def test_a_wrong_result_exits_with_1(bench: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ReferenceRunner.run

    def wrong(runner: Any, call: Any, config: Any) -> None:
        right(runner, call, config)
        call.out_TH.mul_(1.5)

    monkeypatch.setattr(ReferenceRunner, "run", wrong)
    code, stdout, _ = bench(*SMALL, "--tokens", "4", "--out", tmp_path / "r.jsonl")
    assert code == 1
    assert "WRONG, not timed" in stdout
    assert [r.backend for r in read(tmp_path / "r.jsonl")] == ["torch-dequantized", "torch"]


def test_an_interruption_keeps_what_is_finished(bench: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReferenceRunner, "run", interrupted)
    code, stdout, _ = bench(*SMALL, "--tokens", "4", "--out", tmp_path / "r.jsonl")
    assert code != 0
    assert "torch-dequantized" in stdout
    assert [r.backend for r in read(tmp_path / "r.jsonl")] == ["torch-dequantized", "torch"]
