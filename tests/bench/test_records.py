"""Records: their fields, lines, which one counts; the plot."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from share_plot import plot

from polymoe.bench.records import Record, Stamp, append, check_writable, read
from polymoe.errors import ArgumentError
from polymoe.machine import Machine
from polymoe.planning.measured import newest

ONE = Record(
    case="tiny", backend="reference", format="mxfp4", activations="16bit", tokens=4, routing="uniform", median_us=10.0,
    p25_us=9.0, p75_us=12.0, floor_us=5.0, share=0.5, error=1e-3, error_exact=1e-3, device="cpu", torch="2",
    triton=None, commit="abc", date="2026-01-02T03:04:05Z", command="polymoe bench",
)  # fmt: skip


def test_a_line_has_exactly_the_fields(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", ONE)
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == [
        "case", "backend", "format", "activations", "tokens", "routing", "median_us", "p25_us", "p75_us", "floor_us",
        "share", "error", "error_exact", "device", "torch", "triton", "commit", "date", "command", "family", "config",
        "peer", "version", "bandwidth_tb_s",
    ]  # fmt: skip
    assert read(tmp_path / "r.jsonl") == [ONE]


def test_records_from_before_they_said_their_kernels_are_read(tmp_path: Path) -> None:
    old = {name: value for name, value in asdict(ONE).items() if name not in ("family", "config")}
    (tmp_path / "r.jsonl").write_text(json.dumps(old))
    assert read(tmp_path / "r.jsonl") == [ONE]


def test_a_backend_that_was_renamed_has_its_new_name(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", replace(ONE, backend="hopper"))
    assert read(tmp_path / "r.jsonl") == [replace(ONE, backend="cuda")]


def test_the_newest_of_a_key_counts() -> None:
    old, new = replace(ONE, date="2025-01-01T00:00:00Z", median_us=1.0), replace(ONE, median_us=2.0)
    other = replace(ONE, tokens=8)
    assert newest([new, old, other]) == [new, other]
    assert newest([old, new]) == [new]
    assert newest([ONE, new]) == [new]
    assert len(newest([replace(ONE, **{f: "x"}) for f in ("case", "backend", "format", "routing", "device")])) == 5


WHOLE = json.dumps(asdict(ONE))


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"case": "tiny"}', "[" * 10_000, "\xff", WHOLE[:-40], WHOLE.replace("10.0", '"10"'), WHOLE + "1",
     WHOLE.replace('"tokens": 4', '"tokens": true'), WHOLE.replace("10.0", "NaN")],
)  # fmt: skip
def test_lines_that_are_no_records(tmp_path: Path, line: str) -> None:
    append(tmp_path / "r.jsonl", ONE)
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ArgumentError, match=r"line 2: expected a bench record"):
        read(tmp_path / "r.jsonl")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.jsonl")
    for path in (tmp_path, tmp_path / "no" / "r.jsonl"):
        with pytest.raises(ArgumentError, match="a file to append to"):
            check_writable(path)


def test_the_stamp() -> None:
    machine = Machine.of("cpu")
    assert Stamp.now(machine, "polymoe bench", "abc").commit == "abc"
    stamp = Stamp.now(machine, "polymoe bench")
    assert stamp.commit
    assert stamp.device == "cpu"
    date = stamp.fields()["date"]
    assert ONE.date < date
    assert len(date) == len(ONE.date)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(
        [ONE, replace(ONE, tokens=64, share=1.2), replace(ONE, backend="x", activations="fp8_token")],
        tmp_path / "p.png",
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
