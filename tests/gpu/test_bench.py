"""Measuring and tuning on a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polymoe.backends.triton import Triton, TritonConfig
from polymoe.bench import baseline
from polymoe.bench.cases import Workload, random_weights
from polymoe.bench.compile_ahead import CompileAhead
from polymoe.bench.tune import Tune
from polymoe.machine import Machine
from polymoe.planning.table_files import read
from support.tiny import STAMP, TINY, bench


def test_graphs() -> None:
    device = torch.device("cuda")
    workload = bench().workload
    workload = replace(workload, weights=random_weights(workload.problem, device))
    rows = list(bench(workload=workload, machine=Machine.of("cuda"), device=device).rows((1, 9)))
    timed = [row for row in rows if row.record is not None]
    assert {row.tokens for row in timed} == {1, 9}
    if torch.cuda.get_device_capability() == (9, 0):
        assert {row.note for row in timed if row.backend == baseline.NAME} == {"graph"}


def test_tuning_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in other processes, captured, compared, written; the second run finds it all."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    device, machine, file = torch.device("cuda"), Machine.of("cuda"), tmp_path / "tables" / "h200.jsonl"
    case = TINY.changed(hidden=256, intermediate=128)
    with CompileAhead(4) as compiler:
        first = Tune(
            workload=Workload.of_case(case, device),
            machine=machine,
            device=device,
            backends=[Triton()],
            file=file,
            stamp=STAMP,
            seconds=60,
            compiler=compiler,
            say=print,
        )
        found = list(first.outcomes((1, 64)))
    for outcome in found:
        assert outcome.row is not None
        assert outcome.tried >= 5
        assert outcome.row.median_us < 1000
        assert isinstance(TritonConfig.from_dict(outcome.row.config), TritonConfig)
    assert read(file) == [o.row for o in found]
    again = replace(first, compiler=CompileAhead(0))
    assert [o.note for o in again.outcomes((1, 64))] == ["in the table already"] * 2
