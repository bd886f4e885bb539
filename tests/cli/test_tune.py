"""``polymoe tune``: the table it writes is what loads and explain read; refusals; an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import polymoe
from polymoe.backends.config import Config
from polymoe.backends.reference import ReferenceRunner
from polymoe.planning.table_files import add, installed, read, user_file
from polymoe.problem.call import CallArguments

SUMS = Path(__file__).parent.parent.parent / "models" / "sums-gpt-oss-mxfp4"
SMALL = ("--checkpoint", SUMS, "--device", "cpu", "--backends", "reference", "--tokens", "1,4")

Cli = Callable[..., tuple[int, str, str]]


def own_file(device: str) -> Path:
    found = user_file(device)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYMOE_CACHE", str(tmp_path))
    installed.cache_clear()
    # The reference has nothing to tune: it stands for a backend of a GPU.
    monkeypatch.setattr("polymoe.cli.tune._require_choice", lambda *_: None)


def test_a_cpu_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    code, stdout, stderr = cli("tune", *SMALL)
    assert (code, stdout) == (2, "")
    assert "--device: expected a GPU, got cpu" in stderr


def test_a_table_that_explain_reads(cli: Cli) -> None:
    code, out, err = cli("tune", *SMALL)
    assert code == 0
    assert str(own_file("cpu")) in err
    assert "reference" in out
    assert [r.tokens for r in read(own_file("cpu"))] == [1, 4]
    assert "s at 1 to" in str(polymoe.explain(SUMS, device="cpu", backend="reference"))
    assert (
        "measured; predicted from 4 tokens measured"
        in cli("explain", SUMS, "--device", "cpu", "--backend", "reference")[1]
    )
    code, out, _ = cli("tune", *SMALL, "--json")
    assert code == 0
    assert [row["note"] for row in json.loads(out)] == ["in the table already"] * 2


def test_a_cache_that_cannot_be_written_to_is_found_before_anything_is_measured(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYMOE_CACHE", str(tmp_path / "file"))
    code, out, err = cli("tune", *SMALL)
    assert (code, out) == (2, "")
    assert "expected a directory that can be written to" in err
    assert "POLYMOE_CACHE" in err
    assert "tune: " not in err


def test_without_a_cache_a_table_has_to_be_named(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYMOE_CACHE", "~nouser/c")
    code, out, err = cli("tune", *SMALL)
    assert (code, out) == (2, "")
    assert "--out: expected a table to write" in err
    assert cli("tune", *SMALL, "--out", tmp_path / "mine.jsonl")[0] == 0


def test_json_rows_and_another_file(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "mine.jsonl"
    code, stdout, _ = cli("tune", *SMALL, "--out", out, "--json", "--tp", 2)
    rows = json.loads(stdout)
    assert code == 0
    assert [row["tokens"] for row in rows] == [1, 4]
    assert "F=96" in rows[0]["problem"]
    assert not own_file("cpu").exists()
    assert len(read(out)) == 2


def test_a_shipped_or_tuned_gpu_is_explained_anywhere(cli: Cli) -> None:
    from polymoe.planning.measured import problem_key
    from support.table_rows import row

    problem = polymoe.explain(SUMS, device="h200", backend="reference").rows[0].problem
    key = {"problem": problem_key(problem), "backend": "reference", "config": {}}
    add(own_file("h200"), [row(t, 12.5 * t, **key, triton=None) for t in (1, 16)])
    found = json.loads(cli("explain", SUMS, "--device", "h200", "--backend", "reference", "--json")[1])
    predicted = found["rows"][0]["candidates"][0]["predicted"]
    times = {p["tokens"]: (p["time_us"], p["source"]) for p in predicted}
    assert times[1] == (12.5, "measured")
    assert times[16] == (200.0, "measured")
    assert times[4] == (50.0, "measured")  # on the line between both
    assert times[2][1] == "cost model"  # too far below 16
    assert times[32][1] == "cost model scaled to 16 tokens measured"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*SMALL, "--memory", "0.01", "--tokens", "100000"), "--memory: expected at least"),
        (("--case", "kimi-k2", "--tp", 2), "--tp needs --checkpoint"),
    ],
)
def test_refusals(cli: Cli, args: tuple[object, ...], message: str) -> None:
    code, stdout, stderr = cli("tune", *args)
    assert (code, stdout) == (2, "")
    assert message in stderr


def test_an_interruption_prints_what_is_finished(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceRunner.run

    def interrupted(runner: ReferenceRunner, call: CallArguments, config: Config) -> None:
        if len(call.x_TH) == 4:
            raise KeyboardInterrupt
        right(runner, call, config)

    monkeypatch.setattr(ReferenceRunner, "run", interrupted)
    code, stdout, _ = cli("tune", *SMALL, "--json")
    assert code == 130
    assert [row["tokens"] for row in json.loads(stdout)] == [1]
    assert [r.tokens for r in read(own_file("cpu"))] == [1]
