"""``polymoe bench serve``: tables, files, bad input, an interruption, and polymoe's own server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx_aiohttp")

from polymoe.bench.energy import EnergyMeter
from support.standin import Standin

SUMS = Path(__file__).parents[3] / "models" / "sums-gpt-oss-mxfp4"
SMALL = ("--input-len", 20, "--output-len", 10, "--no-warmup")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def standin() -> Iterator[Standin]:
    with Standin(first_s=0.02, gap_s=0.005).running() as running:
        yield running


@pytest.fixture
def bench(cli: Cli, standin: Standin) -> Cli:
    """Runs ``polymoe bench serve`` against the stand-in, in this process: exit code, stdout, stderr."""
    return lambda *args: cli("bench", "serve", "--server", standin.url, *args)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_table_and_records(bench: Cli, standin: Standin, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    more = ("--out", out, "--commit", "abc", "--gpu-price", "2.5", "--gpus", "2")
    code, stdout, stderr = bench("--batch-size", "1,4", *SMALL, *more)
    assert code == 0
    assert stderr.startswith("bench serve: 0/2, ")
    for text in ("standin: words on 2 x GPU at $2.5 an hour", "batch size", "ITL (ms)", "TTFT (s)", "output $/1M"):
        assert text in stdout
    found = records(out)
    assert [(r["batch_size"], r["answered"]) for r in found] == [(1, 1), (4, 4)]
    same = {(r["label"], r["model"], r["commit"], r["gpus"], r["gpu_price"]) for r in found}
    assert same == {("standin", "words", "abc", 2, 2.5)}
    assert found[0]["command"].startswith(f"polymoe bench serve --server {standin.url} --batch-size 1,4 --input-len 20")
    assert bench("--batch-size", "1,4", *SMALL, "--label", "other", *more)[0] == 0
    assert len(records(out)) == 4


def test_chat_a_key_and_more_fields(bench: Cli, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.key = "secret"
    monkeypatch.setenv("POLYMOE_API_KEY", "secret")
    code, stdout, _ = bench("--chat", "--batch-size=2", *SMALL, "--extra-body", '{"top_k": 3}', "--json")
    assert (code, json.loads(stdout)[0]["answered"]) == (0, 2)
    assert standin.measured[-1]["messages"][0]["role"] == "user"
    assert standin.measured[-1]["top_k"] == 3


def test_no_record_holds_the_key(bench: Cli, standin: Standin) -> None:
    standin.key = "secret"
    for given in (("--api-key", "secret"), ("--api-key=secret",)):
        code, stdout, stderr = bench("--batch-size", 1, *SMALL, *given, "--json")
        assert code == 0
        assert "secret" not in stdout + stderr


def test_energy_where_nvml_answers(bench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Meter:
        def joules(self) -> float:
            return 10.0 * len(asked)

        def names(self) -> list[str]:
            return ["NVIDIA H200", "NVIDIA H200"]

    def of_indices(indices: Any) -> Meter:
        asked.append(list(indices))
        return Meter()

    monkeypatch.setattr(EnergyMeter, "of_indices", of_indices)
    code, stdout, _ = bench("--batch-size", 1, *SMALL, "--gpus", 2)
    assert (code, asked) == (0, [[0, 1]])
    assert "standin: words on 2 x NVIDIA H200" in stdout
    assert bench("--batch-size", 1, *SMALL, "--gpu-ids", "3,5")[0] == 0
    assert asked[-1] == [3, 5]


def test_failures_are_said_and_only_a_row_without_answers_exits_with_1(bench: Cli, standin: Standin) -> None:
    standin.breaks, standin.refuses = {0: "500"}, ("ignore_eos",)
    code, stdout, stderr = bench("--batch-size", 2, *SMALL)
    assert code == 0
    assert "1 of 2 (1 failed)" in stdout
    assert "the server refuses ignore_eos" in stderr
    assert "batch size 2, input 20, output 10: 1 x HTTP 500: a fault" in stderr
    standin.room = 0
    code, stdout, _ = bench("--batch-size", 2, *SMALL, "--json")
    assert (code, json.loads(stdout)[0]["refused"]) == (1, 2)


def test_without_httpx_it_says_what_to_install(bench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    code, stdout, stderr = bench()
    assert (code, stdout) == (1, "")
    assert "pip install -e '.[bench]'" in stderr


def test_ctrl_c_keeps_the_rows_that_are_finished(standin: Standin, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    standin.gap_s = 0.05
    running = subprocess.Popen(
        [sys.executable, "-m", "polymoe", "bench", "serve", "--server", standin.url, "--batch-size", "1,2,4",
         "--input-len", "20", "--output-len", "10", "--no-warmup", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    standin.gap_s = 5.0  # what is sent from here on would take most of a minute
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=30)
    assert running.returncode == 130, stderr
    assert "Traceback" not in stderr
    kept = records(out)
    assert 1 <= len(kept) < 3
    assert f"│ {kept[0]['batch_size']} " in stdout


@pytest.mark.slow
def test_polymoes_own_server(cli: Cli, tmp_path: Path) -> None:
    """The command of the documentation, with answers as long as asked and inputs as the server counts them."""
    pytest.importorskip("uvicorn")
    served = subprocess.Popen(
        [sys.executable, "-m", "polymoe", "serve", str(SUMS), "--device", "cpu", "--port", "0"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert served.stderr is not None
        url = next(line.split()[-1] for line in served.stderr if line.startswith("serving on "))
        out = tmp_path / "r.jsonl"
        sizes = ("--batch-size", "1,4,8", "--input-len", 64, "--output-len", 32)
        code, stdout, stderr = cli("bench", "serve", "--server", url, *sizes, "--out", out)
        assert code == 0, stderr
        assert "polymoe: sums-gpt-oss-mxfp4" in stdout
        for r, size in zip(records(out), (1, 4, 8), strict=True):
            counts = (r["batch_size"], r["answered"], r["input_tokens"], r["output_tokens"])
            assert counts == (size, size, 64 * size, 32 * size)
            assert r["engine"] == "polymoe"
            assert r["input_tps"]
            assert r["itl_us"] is not None
        code, stdout, _ = cli("bench", "serve", "--server", url, "--chat", "--batch-size", 4,
                              "--input-len", 64, "--output-len", 16, "--json")  # fmt: skip
        (r,) = json.loads(stdout)
        assert (code, r["answered"], r["input_tokens"], r["output_tokens"]) == (0, 4, 256, 64)
    finally:
        served.terminate()
        served.communicate(timeout=30)
