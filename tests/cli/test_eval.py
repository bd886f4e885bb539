"""``polymoe eval`` and ``polymoe eval compare``: what they print, exit codes, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from polymoe.evaluate import read_records
from support.evaluation import Reply, add, refused, said, serving, sums

Cli = Callable[..., tuple[int, str, str]]


def wrong_for(*digits: str) -> Callable[[dict[str, Any], int], Reply]:
    """A model that cannot add to numbers ending in these."""

    def answer(body: dict[str, Any], _: int) -> Reply:
        number = body["messages"][0]["content"].partition("+")[0]
        return said("no idea") if number.endswith(digits) else add(body)

    return answer


def test_a_table(cli: Cli, tmp_path: Path) -> None:
    with serving(wrong_for("3")) as server:
        code, out, err = cli(
            "eval", sums(tmp_path / "sums.jsonl", 40), "--server", server.url, "--out", tmp_path / "a", "-n", 2
        )
    assert code == 0
    for text in ("small", "sums.jsonl: 40, answers 80", "90.00 % ± 4.80", "over 2 repeats", "tok/s", "p50"):
        assert text in out, text
    assert f"answers: {tmp_path / 'a'}" in err


def test_json(cli: Cli, tmp_path: Path) -> None:
    with serving(add) as server:
        args = ("eval", sums(tmp_path / "s.jsonl", 5), "--server", server.url, "--out", tmp_path / "a", "--json")
        code, out, _ = cli(*args, "--threads", 2, "--extra", '{"top_k": 5}', "--limit", 3)
    found = json.loads(out)
    assert code == 0
    assert found["records"] == str(tmp_path / "a")
    assert found["settings"]["extra"] == {"top_k": 5}
    assert (found["score"]["pass_at_1"], found["score"]["answers"], found["failures"]) == (1.0, 3, [])
    assert server.requests[0]["top_k"] == 5


def test_going_on_is_said(cli: Cli, tmp_path: Path) -> None:
    with serving(add) as server:
        args = ("eval", sums(tmp_path / "s.jsonl", 5), "--server", server.url, "--out", tmp_path / "a")
        cli(*args, "--limit", 2)
        assert "which has 2 of 5; --fresh starts over" in cli(*args)[2]
        assert "are there" not in cli(*args, "--fresh")[2]
        assert len(server.requests) == 10
        code, out, err = cli(*args, "--temperature", 0)
    assert (code, out) == (2, "")
    assert "temperature: None, not 0.0" in err


def test_malformed_replies_are_said(cli: Cli, tmp_path: Path) -> None:
    def one_page(body: dict[str, Any], _: int) -> Reply:
        return (200, b"<html>", {}) if body["messages"][0]["content"] == "2+1=" else add(body)

    with serving(one_page) as server:
        args = ("eval", sums(tmp_path / "s.jsonl", 5), "--server", server.url, "--out", tmp_path / "a")
        code, out, err = cli(*args)
        assert code == 0
        assert "1 without an answer, 1 of them malformed" in out
        assert "note: replies that are not responses of the API, counted as wrong: 1, the first: question " in err
        assert "not JSON: '<html>'" in err
        code, out, _ = cli(*args, "--json")
    assert len(json.loads(out)["malformed"]) == 1
    assert json.loads(out)["score"]["correct"] == 4


def test_failures_exit_with_1_after_the_table(cli: Cli, tmp_path: Path) -> None:
    def one_fails(body: dict[str, Any], _: int) -> Reply:
        return refused(500, "overheated") if body["messages"][0]["content"] == "2+1=" else add(body)

    with serving(one_fails) as server:
        args = ("eval", sums(tmp_path / "s.jsonl", 5), "--server", server.url, "--out", tmp_path / "a", "--retries", 0)
        code, out, err = cli(*args)
    assert code == 1
    assert "answers 4" in out
    assert "expected an answer to every question, got 1 without" in err
    assert "overheated" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "Usage: polymoe eval [OPTIONS] COMMAND"),
        (("run",), "Missing argument 'FILE'"),
        (("absent.jsonl",), "No such file"),
        (("SET", "--extra", "{"), "--extra: expected a JSON object"),
        (("SET", "--endpoint", "chat2"), "did you mean 'chat'? known: chat, completions"),
        (("SET", "--server", "http://127.0.0.1:9"), "http://127.0.0.1:9/v1: expected a server that answers"),
        (("compare", "absent", "SET"), "absent: expected a file of records"),
        (("compare", "SET", "SET"), "expected the settings of a run of polymoe eval"),
    ],
)
def test_what_is_refused(cli: Cli, tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    data = sums(tmp_path / "sums.jsonl", 2)
    code, out, err = cli("eval", *(str(data) if a == "SET" else a for a in args))
    assert (code, out) == (1 if "http://127.0.0.1:9" in args else 2, "")
    assert says in err
    assert "Traceback" not in err
    assert "answered" not in err  # no bar of a run that never began


def test_compare(cli: Cli, tmp_path: Path) -> None:
    data = sums(tmp_path / "sums.jsonl", 100)
    for name, digits in (("a", ("3",)), ("b", ("3", "4", "5"))):
        with serving(wrong_for(*digits)) as server:
            cli("eval", data, "--server", server.url, "--out", tmp_path / name)
    code, out, err = cli("eval", "compare", tmp_path / "a", tmp_path / "b")
    assert (code, err) == (0, "")
    for text in ("90.00 %", "70.00 %", "+20.00 points", "+12.02 to +27.98 points", "100: A better on 20, B on 0"):
        assert text in out, text
    code, out, _ = cli("eval", "compare", tmp_path / "b", tmp_path / "a", "--json")
    found = json.loads(out)
    assert (found["questions"], found["better"], found["worse"], found["notes"]) == (100, 0, 20, [])
    assert found["high"] == pytest.approx(-0.1202, abs=1e-4)


def test_compare_says_what_else_differs(cli: Cli, tmp_path: Path) -> None:
    data = sums(tmp_path / "sums.jsonl", 10)
    with serving(add) as server:
        cli("eval", data, "--server", server.url, "--out", tmp_path / "a")
        cli("eval", data, "--server", server.url, "--out", tmp_path / "b", "--temperature", 0.5, "--limit", 4)
    _, out, err = cli("eval", "compare", tmp_path / "a", tmp_path / "b")
    assert "note: the runs differ in temperature: 0.5, not None" in err
    assert "note: 6 of 10 questions were answered in one run only: left out" in err
    assert "4: A better on 0" in out


def test_compare_needs_two_files(cli: Cli) -> None:
    code, _, err = cli("eval", "compare", "one")
    assert code == 2
    assert "Usage: polymoe eval compare" in err


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    def slow(body: dict[str, Any], _: int) -> Reply:
        time.sleep(0.05)
        return add(body)

    answers = tmp_path / "answers"
    with serving(slow) as server:
        data = sums(tmp_path / "sums.jsonl", 2000)
        command = [sys.executable, "-c", "from polymoe.cli import main; main()"]
        command += ["eval", str(data), "--server", server.url, "--out", str(answers), "--concurrency", "2"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (answers.exists() and len(answers.read_bytes().splitlines()) > 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        start = time.monotonic()
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert running.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    done = len(read_records(answers)[1])
    assert done >= 5
    assert f"{done} of 2000 answers are in {answers}; the same command continues there" in err


def test_help_needs_no_client() -> None:
    code = (
        "import sys; sys.argv = ['polymoe', 'eval', '--help']\n"
        "from polymoe.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'httpx', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("[]\n")
    assert "compare" in run.stdout
