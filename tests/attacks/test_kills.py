"""Writers of records and tables that are killed at any moment, or that run on a full disk: no line is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polymoe.bench import records
from polymoe.planning import table_files

# Compiled modules would be cut by the limit too.
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "models" / "sums-qwen3-fp8"

KILLS = """
import os, random, sys, time, filelock
for attempt in range(40):
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        number = 0
        while True:
            write(attempt, number)
            os.write(there, b"w" if number == 0 else b"")
            number += 1
    os.read(here, 1)  # the first is written
    time.sleep(random.Random(attempt).uniform(0, 0.005))  # some lines: each writer reads those of all before it
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(here), os.close(there)
"""
FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for number in range(10_000):
    try:
        write(0, number)
    except OSError as error:
        print(error.strerror)
        break
"""
RECORD = """
import sys
from pathlib import Path
from polymoe.bench.records import Record, append
def write(attempt, number):
    record = Record(case="c", backend="triton", format="mxfp4", activations="16bit", tokens=attempt + 1,
        routing="uniform", median_us=1.5, p25_us=1.0, p75_us=2.0, floor_us=1.0, share=0.5, error=0.0, error_exact=0.0,
        device="d", torch="2", triton=None, commit="c", date=f"{number:09d}", command="x" * 5000)
    append(Path(sys.argv[1]), record)
"""
TABLE = """
import sys
from pathlib import Path
from polymoe.planning.measured import Measured
from polymoe.planning.table_files import add
def write(attempt, number):
    row = Measured(device="d", backend="triton", problem="p" * 1000, tokens=1 + attempt * 1000 + number % 30,
        config={}, median_us=1.0 + number, torch="2", triton=None, polymoe="0", driver=None,
        date=f"{number:09d}", command="polymoe tune")
    add(Path(sys.argv[1]), [row])
"""


def wrote(tmp_path: Path, write: str, then: str) -> tuple[Path, str]:
    """Run a writer; its file, and what it printed."""
    file = tmp_path / "file.jsonl"
    command = [sys.executable, "-c", write + then, str(file)]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return file, ran.stdout


def test_records_of_killed_writers_are_whole(tmp_path: Path) -> None:
    file, _ = wrote(tmp_path, RECORD, KILLS)
    found = records.read(file)
    assert len({r.tokens for r in found}) == 40
    for tokens in {r.tokens for r in found}:  # none is missing between the first and the last
        dates = [int(r.date) for r in found if r.tokens == tokens]
        assert dates == list(range(len(dates)))


@pytest.mark.slow
def test_tables_of_killed_writers_are_whole(tmp_path: Path) -> None:
    file, _ = wrote(tmp_path, TABLE, KILLS)
    found = table_files.read(file)
    assert len({(row.tokens - 1) // 1000 for row in found}) == 40
    for attempt in {(row.tokens - 1) // 1000 for row in found}:
        numbers = sorted(int(row.date) for row in found if (row.tokens - 1) // 1000 == attempt)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.parametrize("write", [RECORD, pytest.param(TABLE, marks=pytest.mark.slow)], ids=["records", "table"])
def test_a_full_disk_leaves_whole_lines(write: str, tmp_path: Path) -> None:
    file, printed = wrote(tmp_path, write, FULL)
    assert printed == "File too large\n"
    content = file.read_bytes()
    assert 5_000 < len(content) <= 20_000
    assert content.endswith(b"\n")
    assert all(json.loads(line) for line in content.splitlines())


@pytest.mark.slow
def test_bench_on_a_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)); from polymoe.cli import main; main()"
    )
    arguments = ["--checkpoint", str(CHECKPOINT), "--tokens", "1,2,3,4,5,6", "--device", "cpu", "--out", str(file)]
    command = [sys.executable, "-c", program, "bench", *arguments]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert 0 < len(records.read(file)) < 12
