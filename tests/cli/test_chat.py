"""``polymoe chat`` and ``run`` with and without a terminal: streams, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"

Cli = Callable[..., tuple[int, str, str]]


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class TestWithoutATerminal:
    def test_each_line_is_a_message(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        typed(monkeypatch, "123+456\n\n/clear\n7-9\n/exit\n1+1")
        code, out, err = cli("chat", SUMS, "--device", "cpu")
        assert code == 0
        assert out == "579\n-2\n"
        assert "the conversation starts over" in err
        assert "tokens/s on cpu; experts 15.4 MiB in layout dequantized" in err

    def test_json_lines(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        typed(monkeypatch, "123+456\n7-9\n")
        code, out, err = cli("chat", SUMS, "--device", "cpu", "--json", "--max-new-tokens", 3, "--system", "Add.")
        assert code == 0
        first, second = map(json.loads, out.splitlines())
        assert (first["prompt"], first["text"], first["ended"]) == ("123+456", "579", "length")
        assert (second["text"], second["ended"], second["tokens"]) == ("-2", "stop", 3)
        assert "cut off after 3 tokens: --max-tokens" in err

    def test_a_closed_stdin(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert cli("chat", SUMS, "--device", "cpu")[:2] == (0, "")
        monkeypatch.setattr(sys, "stdin", None)
        code, _, err = cli("run", SUMS, "--device", "cpu")
        assert (code, "expected a prompt" in err) == (2, True)

    def test_bytes_that_are_not_text(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.TextIOWrapper(io.BytesIO(b"\xff123+456\xfe\n"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", raw)
        assert cli("chat", SUMS, "--device", "cpu")[:2] == (0, "579\n")

    def test_a_message_that_does_not_fit_ends_it(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        typed(monkeypatch, "1+" * 200 + "\n1+1\n")
        code, out, err = cli("chat", SUMS, "--device", "cpu")
        assert code != 0
        assert out == ""
        assert "fewer tokens than the context's 256" in err

    def test_reasoning_is_not_in_the_answer(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a response template that reads digits before a 0 as reasoning, in chat and in run."""
        from polymoe.engines.transformers import tokenizer

        def add(found: Any, _: Any) -> None:
            fields = {"thinking": {"open": "1", "close": "0"}, "content": {"close": "<|return|>"}}
            found.response_template = {"start_anchor": "=", "fields": fields}

        monkeypatch.setattr(tokenizer, "set_response_template", add)
        typed(monkeypatch, "700+509\n")  # 1209
        code, out, err = cli("chat", SUMS, "--device", "cpu", "--reasoning")
        assert (code, out) == (0, "9\n")
        assert "\n2\n" in err
        typed(monkeypatch, "700+509\n")
        assert "\n2\n" not in cli("chat", SUMS, "--device", "cpu")[2]
        assert cli("run", SUMS, "--device", "cpu", "700+509=")[1] == "9\n"
        _, out, err = cli("run", SUMS, "--device", "cpu", "700+509=", "--max-tokens", 2)
        assert (out, "cut off after 2 tokens of reasoning, before its answer" in err) == ("\n", True)
        answers = json.loads(cli("run", SUMS, "--device", "cpu", "700+509=", "--json")[1])["answers"]
        assert answers == [{"prompt": "700+509=", "text": "9", "tokens": 5, "reasoning": "2"}]


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_tensor_parallelism_says_how(cli: Cli, verb: str) -> None:
    for option in ("--tp", "--tensor-parallel-size"):
        code, out, err = cli(verb, SUMS, option, 2)
        assert code != 0
        assert out == ""
        assert "--device-map auto" in err
        assert "vllm serve MODEL --tensor-parallel-size 2" in err


def test_a_device_map_loads_the_model(cli: Cli) -> None:
    pytest.importorskip("accelerate")
    assert cli("run", SUMS, "--device-map", "auto", "1+1=")[:2] == (0, "2\n")


def test_run_says_what_it_waits_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    assert "one per line, until Ctrl-D" in cli("run", SUMS)[2]


SLOW = """
import sys, time
from polymoe.engines.transformers.generator import Generator
load = Generator.load
def slow(*args, **kwargs):
    generator = load(*args, **kwargs)
    generator.model.register_forward_pre_hook(lambda *_: time.sleep(2))
    return generator
Generator.load = slow
sys.argv = ["polymoe", "chat", *sys.argv[1:]]
from polymoe.cli import main
main()
"""
"""``polymoe chat`` with a model that needs 2 s for a token: time enough to interrupt it on a busy machine."""


class Terminal:
    """A process whose stdin, stdout and stderr are a terminal of 100 columns."""

    def __init__(self, *command: object) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self, text: str) -> None:
        """Send SIGINT until the text appears: one that comes just before the process waits does not wake it."""
        for _ in range(40):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                return self.until(text, 3)
        raise AssertionError(f"no {text!r} in {self.text!r}")

    def until(self, text: str, seconds: float = 240) -> None:
        """Read until the text appears, and forget what stood before its end."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, f"no {text!r} in {self.text!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # the process has ended
                    assert text in self.text, f"no {text!r} in {self.text!r}"
        self.text = self.text.partition(text)[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_on_a_terminal() -> None:
    """Ctrl-C stops the reply and not the chat; Ctrl-D leaves."""
    terminal = Terminal(sys.executable, "-c", SLOW, SUMS, "--device", "cpu")
    try:
        terminal.until("Ctrl-D leaves")
        terminal.until(">>> ")
        terminal.type("/help\n")
        terminal.until("forget the conversation")
        terminal.until(">>> ")
        terminal.type("/nothing\n")
        terminal.until("unknown command /nothing; /help lists them")
        terminal.until(">>> ")
        terminal.type("/system Be brief.\n")
        terminal.until("the system message is set at the start")
        terminal.until(">>> ")
        terminal.type("/temperature 0.3\n")
        terminal.until("unknown command /temperature; /help lists them")
        terminal.until(">>> ")
        terminal.type("123+456\n")
        terminal.until("\n5")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("(stopped)")
        terminal.until(">>> ")
        terminal.interrupt("(Ctrl-D or /exit leaves)")  # at the prompt it only says how to leave
        terminal.until(">>> ")
        terminal.type("/clear\n")
        terminal.until("starts over")
        terminal.until(">>> ")
        terminal.type("7-9\\\n")
        terminal.until("... ")
        terminal.type("=\n")
        terminal.until("-2")
        terminal.until(">>> ")
        terminal.type("\x04")
        terminal.until("tokens/s")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
