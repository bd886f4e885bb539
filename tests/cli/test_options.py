"""Every option of every command: a wrong value exits with 2 and names the option; help, groups and old forms."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from polymoe.bench.cases import CASES
from polymoe.cli import app, options
from polymoe.formats import FORMATS
from polymoe.planning.plan import ROLE_TOKENS
from polymoe.problem.activation_quantization import ACTIVATIONS

ROOT = Path(__file__).parents[2]
SUMS = str(ROOT / "models" / "sums-gpt-oss-mxfp4")

README = ROOT / "README.md"
"""No directory: paths below it cannot be made, not even by root."""

Cli = Callable[..., tuple[int, str, str]]


def commands(of: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its whole name."""
    of = of or get_command(app)
    for part, command in of.commands.items():
        whole = f"{name} {part}".strip()
        yield from commands(command, whole) if hasattr(command, "commands") else [(whole, command)]


COMMANDS = dict(commands())

NEEDED: dict[str, list[str]] = {
    "explain": [SUMS],
    "models": [],
    "verify": [SUMS],
    "run": [SUMS, "1+1="],
    "chat": [SUMS],
    "serve": [SUMS, "--port", "0"],
    "quantize": [SUMS, "--format", "mxfp4", "--out", "new"],
    "bench kernels": ["--case", "gpt-oss-20b", "--experts", "2", "--hidden", "64", "--intermediate", "32"],
    "bench decode": [SUMS, "--prompt-len", "8", "--steps", "2", "--prefill-len", "8"],
    "bench serve": ["--server", "http://127.0.0.1:9"],
    "bench slots": ["--trace", "no/such/trace"],
    "tune": ["--case", "gpt-oss-20b"],
    "doctor": [],
}
"""Arguments that are valid."""

WRONG = {
    "--backend": "magic", "--backends": "magic", "--device": "warp", "--device-map": "magic", "--routing": "zipf:0",
    "--tokens": "1,0", "--batch-size": "1,x", "--experts": "all", "--measure": "all", "--implementations": ",",
    "--attention": "magic", "--prefill-attention": "magic",
    "--input-len": "x",
    "--output-len": "0", "--gpu-ids": "x", "--extra-body": "[1]", "--server": "nonsense",
    "--api-key": "\u00e4", "--out": f"{README}/file",
    "--profile": f"{README}/directory/file.json",
    "--record-routing": f"{README}/file",
    "--host": "no such host", "--cors-origins": "*,nonsense",
}  # fmt: skip
"""Wrong values of options that take text; a new one needs a row. Of numbers and choices "nonsense" is wrong."""

FREE = {
    "--commit", "--label", "--model", "--name", "--system",  # any text
    "--checkpoint",  # a checkpoint that is refused exits with 1, as the argument does
}  # fmt: skip


def valued_options() -> Iterator[Any]:
    for name, command in COMMANDS.items():
        for param in command.params:
            option = param.opts[0]
            if not option.startswith("--") or param.is_flag or option in FREE or option == "--help":
                continue
            yield pytest.param(name, option, id=f"{name} {option}")


@pytest.mark.parametrize(("name", "option"), list(valued_options()))
def test_a_wrong_value_exits_with_2(cli: Cli, name: str, option: str) -> None:
    value = WRONG.get(option, "nonsense")
    if option == "--experts" and name == "bench kernels":
        value = "0"
    code, out, err = cli(*name.split(), *NEEDED[name], option, value)
    assert (code, out) == (2, ""), err
    assert option in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns every option is there in full, and the examples are commands that parse."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli(*name.split(), "-h")
    assert (code, err) == (0, "")
    assert out == cli(*name.split(), "--help")[1]
    for param in COMMANDS[name].params:
        for option in (*param.opts, *param.secondary_opts):
            assert option.startswith("-") is False or re.search(rf"(^|[\s,/]){option}\b", out, flags=re.M), option
    assert [line for line in out.partition("Examples:")[0].splitlines() if len(line) > 80] == []
    assert " range>" not in out
    examples = re.findall(r"^    \$ (.*)$", out, flags=re.M)
    assert examples, "no examples"
    for example in examples:
        words = [word for word in shlex.split(example.partition(" < ")[0]) if "=" not in word or " " in example]
        words = words[words.index("polymoe") + 1 :]
        assert words[: len(name.split())] == name.split()
        COMMANDS[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("bench", "--case", "nonsense"), "bench kernels"),
        (("bench", "--tokens", "x", "--case", "gpt-oss-20b"), "--tokens"),
        (("bench", "decodee"), "decode"),
        (("bench",), "bench [OPTIONS] COMMAND"),
    ],
)
def test_groups_and_old_forms(words: tuple[str, ...], command: str, cli: Cli) -> None:
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert command in err


@pytest.mark.parametrize("name", ["", "bench"])
def test_lists_of_commands_are_not_cut(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = cli(*name.split(), "-h")[1]
    listed = out.partition("Commands:")[2].split("\n\n")[0]
    assert listed
    assert "..." not in listed


@pytest.mark.parametrize("name", ["verify", "bench kernels"])
def test_a_layer_that_is_not_there_is_a_wrong_value(name: str, cli: Cli) -> None:
    checkpoint = [SUMS] if name == "verify" else ["--checkpoint", SUMS]
    code, out, err = cli(*name.split(), *checkpoint, "--layer", "99")
    assert (code, out) == (2, "")
    assert "--layer: expected a layer with routed experts (0-3), got 99, no such layer" in err


def test_wrong_values_are_told_before_the_work(cli: Cli) -> None:
    assert "bytes" not in cli("verify", SUMS, "--backend", "magic")[2]
    assert "existing path" in cli("run", f"{SUMS}x")[2]  # not that there is no prompt


@pytest.mark.parametrize(
    ("asked", "named"),
    [("mixtral", "mistralai/Mixtral-8x7B"), ("GPT-OSS-20B", "openai/gpt-oss-20b"), ("qwen3-30b", "Qwen/Qwen3-30B-A3B")],
)
def test_models_are_suggested_by_a_part_of_their_name(asked: str, named: str, cli: Cli) -> None:
    code, _, err = cli("explain", asked)
    assert (code, named in err) == (1, True), err


def test_an_unknown_gpu_is_told_what_to_name(cli: Cli) -> None:
    code, _, err = cli("explain", SUMS, "--device", "NVIDIA GeForce RTX 4080")
    assert code == 2
    assert "did you mean 'rtx4090'?" in err
    assert "sm_89" in err


def test_choices_are_those_of_the_tables() -> None:
    assert set(get_args(options.CaseName)) == set(CASES)
    assert set(get_args(options.FormatName)) == set(FORMATS)
    assert set(get_args(options.ActivationsName)) == set(ACTIVATIONS)
    assert set(get_args(options.RoleName)) == set(ROLE_TOKENS)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("polymoe bench de", ["decode"]),
        ("polymoe run --role de", ["decode"]),
        ("polymoe serve --backend tri", ["triton"]),
        ("polymoe explain --device rtx4", ["rtx4090"]),
        ("polymoe run --device cp", ["cpu"]),
        ("polymoe chat openai/", ["openai/gpt-oss-120b", "openai/gpt-oss-20b"]),
        ("polymoe verify model", ["models/"]),
    ],
)
def test_completion(words: str, found: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of commands, choices, backends, GPUs and models, as a shell asks for them."""
    asked = {"_POLYMOE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    code, out, err = cli()
    assert (code, sorted(out.split())) == (0, found), err


def test_completion_of_the_module() -> None:
    asked = {"_POLYMOE_COMPLETE": "complete_bash", "COMP_WORDS": "polymoe be", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "polymoe"]
    assert (
        subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True).stdout.strip() == "bench"
    )


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_a_shell_without_completion_is_refused(
    option: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And nothing is installed for another one, whose start-up file would change."""
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = cli(option, "bsh")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert f"{option}: got 'bsh'\n  hint: did you mean 'bash'?" in err


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef polymoe"), ("fish", "complete --command polymoe")])
def test_the_shell_whose_completion_is_shown_can_be_named(shell: str, line: str, cli: Cli) -> None:
    code, out, _ = cli("--show-completion", shell)
    assert (code, out.startswith(line)) == (0, True)


def test_options_stand_under_the_headings_of_their_groups(cli: Cli) -> None:
    out = cli("serve", "-h")[1]
    sections = {part.partition(":\n")[0]: part for part in out.split("\n\n")}
    assert "--max-concurrent-requests" in sections["Limits"]
    assert "--device-map" in sections["Device and backend"]
    assert re.findall(r"--[a-z]+", sections["Options"]) == ["--help"]


def test_commands_take_few_arguments() -> None:
    """Options are declared in groups, as dataclasses that commands share."""
    for command in COMMANDS.values():
        assert len(inspect.signature(inspect.unwrap(command.callback)).parameters) <= 12


def test_the_checkpoint_that_comes_with_polymoe(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = cli("explain", "demo", "--device", "h200")
    assert (code, out.splitlines()[0]) == (0, f"{SUMS}: gpt_oss, on h200 (sm_90)")
    (tmp_path / "demo").mkdir()  # a directory of the user's goes first
    assert cli("explain", "demo", "--device", "h200")[0] == 1


def test_examples_name_no_file_that_only_a_clone_has() -> None:
    for name, command in COMMANDS.items():
        assert "models/" not in (command.epilog or ""), name
