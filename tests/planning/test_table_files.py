"""Files of measured times: merged by many processes, corrupt ones ignored and kept, shipped ones whole."""

from __future__ import annotations

import json
import warnings
from functools import partial
from importlib import resources
from pathlib import Path

import pytest

import polymoe
from planning.test_measured import PROBLEM
from polymoe.backends import BACKENDS
from polymoe.errors import FormatError
from polymoe.machine import DEVICES, Machine
from polymoe.planning.table_files import add, file_name, installed, parse, read, user_file
from support.forked import exit_codes
from support.table_rows import row

ROOT = Path(polymoe.__file__).parent.parent.parent
SHIPPED = sorted(Path(str(resources.files("polymoe.planning") / "tables")).glob("*.jsonl"))


def own_file(device: str) -> Path:
    found = user_file(device)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("POLYMOE_CACHE", str(tmp_path / "cache"))
    installed.cache_clear()
    return tmp_path / "cache"


def test_names_of_files() -> None:
    assert file_name("h200") == "h200.jsonl"
    assert file_name("NVIDIA RTX 4000 Ada / ../x") == "nvidia-rtx-4000-ada-..-x.jsonl"
    assert len({file_name(name) for name in DEVICES}) == len(DEVICES)


def test_rows_are_merged_newest_first_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "h200.jsonl"
    assert read(path) == []
    assert add(path, [row(8, 1.0, date="b"), row(1, 1.0)]) is None
    add(path, [row(8, 2.0, date="a"), row(1, 3.0, date="2027")])
    assert [(r.tokens, r.median_us) for r in read(path)] == [(1, 3.0), (8, 1.0)]
    assert {p.name for p in path.parent.iterdir()} <= {"h200.jsonl", "h200.jsonl.lock"}


def test_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h200.jsonl"

    def write(first: int) -> None:
        for tokens in range(first, first + 25):
            add(path, [row(tokens)])

    assert exit_codes(*(partial(write, 1 + 100 * n) for n in range(3))) == [0, 0, 0]
    assert [r.tokens for r in read(path)] == sorted(1 + 100 * n + i for n in range(3) for i in range(25))


def test_links_beside_the_file_are_not_written_through(tmp_path: Path) -> None:
    path, precious = tmp_path / "h200.jsonl", tmp_path / "precious"
    precious.write_text("precious")
    for name in ("h200.jsonl.new", "h200.jsonl.corrupt-1"):
        (tmp_path / name).symlink_to(precious)
    path.write_text("half a li")
    add(path, [row(1)])
    assert precious.read_text() == "precious"
    assert [r.tokens for r in read(path)] == [1]


@pytest.mark.parametrize("half", [b'{"device": "h200", "backe', b'{"device": "\xc3', bytes(50), b"[" * 10_000])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_half_a_line_costs_no_other(tmp_path: Path, half: bytes, place: int) -> None:
    file = own_file("h200")
    add(file, [row(1), row(8)])
    lines = file.read_bytes().splitlines()
    lines.insert(place, half)
    file.write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning, match=rf"1 of 3 measured times are not used, the first: .*line {place + 1}"):
        assert [r.tokens for r in installed("h200").sources[0]] == [1, 8]
    with pytest.raises(FormatError, match=f"line {place + 1}"):
        read(file)
    aside = add(file, [row(64)])
    assert aside is not None
    assert aside.read_bytes() == b"\n".join(lines)
    assert [r.tokens for r in read(file)] == [1, 8, 64]


@pytest.mark.parametrize(
    "change",
    [{"tokens": 2**40}, {"tokens": True}, {"median_us": 1e300}, {"median_us": "5"}, {"config": [1]}, {"backend": None}],
    ids=str,
)
def test_rows_of_absurd_values_are_none(change: dict[str, object]) -> None:
    lines = parse(json.dumps({**row(1).to_dict(), **change}).encode(), "where")
    assert (len(lines.rows), len(lines.errors)) == (0, 1)
    assert next(iter(change)) in str(lines.errors[0])


@pytest.mark.parametrize("content", [b"not json\n", b"[]\n", b'{"device": "h200"}\n', b"\xff\xfe\n"])
class TestCorrupt:
    def test_it_is_ignored_with_one_warning(self, content: bytes) -> None:
        file = own_file("h200")
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        with pytest.warns(UserWarning, match=r"h200\.jsonl"):
            first = installed("h200")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert installed("h200") is first
        assert first.sources[0] == ()

    def test_it_is_kept_aside_by_the_next_tune(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "h200.jsonl"
        for number in (1, 2):
            path.write_bytes(content)
            aside = add(path, [row(number)])
            assert aside is not None
            assert aside == tmp_path / f"h200.jsonl.corrupt-{number}"
            assert aside.read_bytes() == content
            assert [r.tokens for r in read(path)] == [number]


def test_a_line_that_is_none_is_named() -> None:
    lines = parse(f"{_line()}\n{_line().replace(': 1,', ': -1,')}\n".encode(), "where")
    assert (len(lines.rows), len(lines.errors)) == (1, 1)
    assert "where, line 2, tokens: expected a whole number from 1 to 16777216, got -1" in str(lines.errors[0])


def _line() -> str:
    return json.dumps(row(1).to_dict())


def test_new_rows_are_seen_by_this_process() -> None:
    assert installed("h200").sources[0] == ()
    add(own_file("h200"), [row(3)])
    assert [r.tokens for r in installed("h200").sources[0]] == [3]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_tables_fit_the_backends_they_name(path: Path) -> None:
    rows = read(path)
    assert rows
    assert path.name == file_name(rows[0].device)
    assert len({r.device for r in rows}) == 1
    device = DEVICES[rows[0].device]
    for r in rows:
        kind = type(BACKENDS[r.backend].configure(PROBLEM, Machine(device), r.tokens))
        read_back = kind.from_dict(r.config).to_dict()
        # Fields that are newer than the row have their defaults.
        assert {name: read_back[name] for name in r.config} == r.config
