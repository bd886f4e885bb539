"""The command line: what each verb prints where, exit codes, JSON, bad input."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from polymoe.cli import main
from support import requantized
from support.configs import config

ROOT = Path(__file__).parent.parent.parent
SUMS = ROOT / "models" / "sums-gpt-oss-mxfp4"

Cli = Callable[..., tuple[int, str, str]]


def write(path: Path, content: dict[str, object]) -> Path:
    path.write_text(json.dumps(content))
    return path


def into(stdout: TextIO, monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    """Runs ``polymoe`` in this process with another stdout; its exit code."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "argv", ["polymoe", *map(str, args)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


class TestExplain:
    def test_tables(self, cli: Cli) -> None:
        code, out, err = cli("explain", SUMS, "--device", "h200")
        assert (code, err) == (0, "")
        for text in ("gpt_oss, on h200 (sm_90)", "mxfp4", "0-3", "reference", "only on request", "1.8 MiB", "6.8 MiB"):
            assert text in out

    def test_json(self, cli: Cli) -> None:
        code, out, err = cli("explain", SUMS, "--device", "rtx5090", "--json")
        found = json.loads(out)
        assert (code, err) == (0, "")
        assert found["rows"][0]["layers"] == [0, 1, 2, 3]
        assert found["rows"][0]["device"] == {"name": "rtx5090", "arch": "sm_120", "rates": "datasheet"}

    def test_nested_config_alone_with_ranks(self, cli: Cli, tmp_path: Path) -> None:
        kimi = config("kimi-k2.5-int4", hidden=7168, intermediate=2048, experts=384, top_k=8, layers=61)
        path = write(tmp_path / "config.json", kimi)
        code, out, _ = cli("explain", path, "--device", "b200", "--tp", 8, "--tp-rank", 7, "--json")
        (row,) = json.loads(out)["rows"]
        assert code == 0
        assert row["problem"] == "int4_g32, H=7168 F=256 E=384 A=8, swiglu, x bf16, tp=8"
        assert row["layers"] == list(range(1, 61))

    def test_names_of_directories_are_not_markup_and_need_not_be_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """On a stdout that encodes strictly."""
        directory = tmp_path / os.fsdecode(b"[red] [/bold] \xff \x1b[2J")
        directory.mkdir(parents=True)
        write(directory / "config.json", config("gpt-oss-mxfp4"))
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
        assert into(stdout, monkeypatch, "explain", directory / "config.json", "--device", "cpu") == 0
        stdout.seek(0)
        assert r"[red] [/bold] \udcff \x1b[2J/config.json: gpt_oss, on cpu" in stdout.read()
        assert capsys.readouterr().err == ""

    def test_every_range_and_the_whole_model(self, cli: Cli) -> None:
        code, out, _ = cli("explain", "openai/gpt-oss-20b", "--device", "NVIDIA H200")
        assert code == 0
        assert re.search(
            r"1-\d+ +│ cuda +│ w4a16_mma_ordered +│ [\d.]+ us at 1 to [^│]+│ [^│]+│ [^│]+│ timed on h200", out
        )
        assert re.search(r"16 +│ [\d.]+ ms +│ [\d.]+ us +│ [\d.]+ ms +│ [\d,]+ ", out)
        verdicts = out.split("verdicts of all backends")[1]
        times = {name: float(re.findall(rf"│ {name} +│[^│]+│ ([\d.]+)", verdicts)[0]) for name in ("cuda", "triton")}
        assert 1 < times["cuda"] < times["triton"]  # over the floor: why auto takes the former

    def test_cells_without_a_value_say_why(self, cli: Cli) -> None:
        _, out, _ = cli("explain", "openai/gpt-oss-20b", "--device", "rtx4090")
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
        assert any("prefill: not predicted" in row for row in rows)
        assert any(row[-2:] == ["refused", "refused"] for row in rows)
        filled = [row for row in rows if row[0]]  # the others continue a cell
        assert not [row for row in filled for cell in row if cell in ("", "-")]

    def test_a_plan_that_keeps_16_bits_for_few_tokens(self, cli: Cli) -> None:
        name = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
        asked = ("explain", name, "--device", "gb10", "--backend", "flashinfer")
        code, out, _ = cli(*asked, "--activations", "nvfp4")
        assert code == 0
        assert [line.split("│")[1:3] for line in out.splitlines() if line.startswith(("│ 1-63", "│ 64+"))] == [
            [" 1-63   ", " flashinfer, 16-bit inputs "], [" 64+    ", " flashinfer                "],
        ]  # fmt: skip
        assert "repeated calls differ in rounding" in " ".join(out.split())
        code, out, _ = cli(*asked)
        assert (code, "16-bit inputs" in out, "64+" in out) == (0, False, False)

    def test_nothing_is_cut_on_a_narrow_terminal(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        for device in ("rtx4090", "h200"):
            code, out, _ = cli("explain", "openai/gpt-oss-20b", "--device", device)
            assert code == 0
            assert max(map(len, out.splitlines())) <= 80
            assert "…" not in out

    def test_without_a_plan(self, cli: Cli) -> None:
        code, out, _ = cli("explain", SUMS, "--device", "rtx4090", "--batch-invariant")
        assert code == 0
        assert "no backend runs mxfp4 experts here" in out
        assert "nothing runs here with backend auto" in out
        assert "one layer" not in out


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "code", "message"),
        [
            (("explain", "no/such/path"), 1, "no/such/path"),
            (("verify", "/no/such/path"), 1, "/no/such/path"),
            (("run", "/no/such/path", "1+1="), 1, "/no/such/path"),
            (("serve", "/no/such/path"), 1, "/no/such/path"),
            (("explain", ROOT / "docs"), 1, "config.json"),
            (("explain", ROOT / "README.md"), 1, "config.json"),
            (("explain", SUMS, "--role", "decoder"), 2, "did you mean 'decode'"),
            (("explain", SUMS, "--activations", "fp4"), 2, "known: 16bit"),
            (("explain", SUMS, "--tp", 10**9), 2, "error: --tp: expected 1 to 4096 ranks, got 1000000000"),
            (("explain", SUMS, "--ep", 10**30), 2, "ep: expected 1 to 4096 ranks, got 1000000000"),
            (("explain", "a" * 5000), 1, "got File name too long"),
            (("verify", SUMS, "--device", "rtx4090"), 2, "--device: expected auto, cpu, cuda or cuda:N, got 'rtx4090'"),
            (("verify", SUMS, "--backend", "magic"), 2, "known: auto, cuda, "),
            (("run", SUMS, "--device", "cpu", "--graphs", "1+1="), 2, "--graphs: expected a GPU"),
            (("run", SUMS, "--device", "cpu", "1+" * 200), 2, "prompt: expected fewer tokens than the context's 256"),
        ],
    )
    def test_an_exit_code_and_a_message(self, cli: Cli, args: tuple[object, ...], code: int, message: str) -> None:
        """1 for a problem, 2 for a wrong value."""
        ended, out, err = cli(*args)
        assert (ended, out) == (code, "")
        assert message in err
        assert "Traceback" not in err

    @pytest.mark.parametrize(
        "args",
        [
            ("explain",),
            ("explain", SUMS, "--tp", "0"),
            ("explain", SUMS, "--nonsense"),
            ("fly",),
        ],
    )
    def test_wrong_usage_exits_with_2(self, cli: Cli, args: tuple[object, ...]) -> None:
        code, out, err = cli(*args)
        assert (code, out) == (2, "")
        assert "Usage: polymoe" in err

    @pytest.mark.parametrize("verb", ["explain", "verify", "run", "serve", "bench"])
    def test_every_verb_refuses_a_broken_checkpoint(self, verb: str, cli: Cli, tmp_path: Path) -> None:
        path = shutil.copytree(SUMS, tmp_path / "checkpoint")
        index = path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-00002", "../model-00002"))
        args = {
            "run": ("run", path, "1+1=", "--device", "cpu"),
            "serve": ("serve", path, "--port", 0, "--device", "cpu"),
            "bench": ("bench", "--checkpoint", path, "--device", "cpu", "--tokens", 1),
        }
        code, out, err = cli(*args.get(verb, (verb, path)))
        assert (code, out) == (1, "")
        assert "model.safetensors.index.json: " in err
        assert "expected a file inside the checkpoint's directory" in err
        assert "Traceback" not in err

    def test_unknown_things_in_a_config(self, cli: Cli, tmp_path: Path) -> None:
        good = config("gpt-oss-mxfp4")
        for change, message in (
            ({"quantization_config": {"quant_method": "mxpf4"}}, "did you mean 'mxfp4'"),
            ({"model_type": "gpt_osss"}, "did you mean 'gpt_oss'"),
            ({"hidden_size": "wide"}, "hidden_size"),
        ):
            code, _, err = cli("explain", write(tmp_path / "config.json", good | change))
            assert code == 1
            assert message in err


class TestVerify:
    def test_the_trained_checkpoint(self, cli: Cli) -> None:
        code, out, _ = cli("verify", SUMS, "--layer", 1, "--tokens", "1,16")
        assert code == 0
        assert "all good" in out
        assert "reference" in out

    def test_json(self, cli: Cli) -> None:
        code, out, _ = cli("verify", SUMS, "--layer", 2, "--tokens", "3", "--backend", "reference", "--json")
        found = json.loads(out)
        assert code == 0
        assert found["ok"]
        assert found["layers"][0]["repacked"] == found["layers"][0]["second_reading"] == 8
        assert found["layers"][0]["oracle_error"] < 1e-12
        assert [(row["backend"], row["tokens"]) for row in found["backends"]] == [("reference", 3)]
        assert 0 < found["backends"][0]["error"] < 6e-3

    def test_a_difference_from_the_config_is_a_plain_warning(self, cli: Cli, tmp_path: Path) -> None:
        claimed = tmp_path / "claimed"
        shutil.copytree(SUMS, claimed)
        wrong = {"quantization_config": {"quant_method": "fp8"}}
        write(claimed / "config.json", json.loads((SUMS / "config.json").read_text()) | wrong)
        code, out, err = cli("verify", claimed, "--layer", 1, "--tokens", 1, "--json")
        assert code == 0
        assert json.loads(out)["layers"][0]["format"] == "mxfp4"
        assert err.strip().splitlines()[-1].startswith(f"warning: {claimed}: model.layers.1.mlp.experts")

    def test_layers_that_are_not_there_are_said(self, cli: Cli, tmp_path: Path) -> None:
        part = tmp_path / "part"
        shutil.copytree(SUMS, part)
        (part / "model-00002-of-00002.safetensors").unlink()
        code, out, err = cli("verify", part, "--tokens", 1, "--json")
        found = json.loads(out)
        assert code == 0
        assert [row["layer"] for row in found["layers"]] + found["absent"] == [0, 1, 2, 3]
        assert found["absent"]
        assert "note: not verified, because not in the files: layers" in err

    def test_an_interrupt_leaves_no_traceback(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        import polymoe.verify

        def interrupted(*args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(polymoe.verify, "verify", interrupted)
        code, out, err = cli("verify", SUMS)
        assert (code, out) == (130, "")
        assert err.splitlines()[-1] == "interrupted"


class TestRun:
    def test_answers_and_figures(self, cli: Cli) -> None:
        code, out, err = cli("run", SUMS, "--device", "cpu", "123+456=", "12 - 34")
        assert code == 0
        assert out.splitlines() == ["123+456= 579", "12 - 34 -22"]
        assert "tokens/s" in err
        assert "on cpu; experts 15.4 MiB in layout dequantized, 6.8 MiB in 16 bits, backend torch" in err

    def test_json(self, cli: Cli) -> None:
        code, out, _ = cli("run", SUMS, "--device", "cpu", "999+1=", "--json", "--max-tokens", 9)
        found = json.loads(out)
        assert code == 0
        assert found["answers"] == [{"prompt": "999+1=", "text": "1000", "tokens": 5}]
        assert (found["backends"], found["layouts"]) == (["torch"], ["dequantized"])
        assert found["stored_bytes"] < 0.3 * found["dequantized_bytes"] < found["packed_bytes"]
        assert found["tokens_per_second"] > 0

    def test_prompts_from_stdin(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("2+2=\n\n500-499=\n"))
        assert cli("run", SUMS, "--device", "cpu")[1].splitlines() == ["2+2= 4", "500-499= 1"]
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
        code, _, err = cli("run", SUMS, "--device", "cpu")
        assert code == 2
        assert "expected a prompt" in err


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in BF16."""
    return requantized.write("BF16", tmp_path_factory.mktemp("bf16") / "bf16")


class TestQuantize:
    def test_it_writes_what_run_takes(self, cli: Cli, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        code, table, err = cli("quantize", source, "--format", "nvfp4", "--out", out, "--dialect", "modelopt")
        assert (code, err.splitlines()[-1]) == (0, "layer 3")
        for text in ("nvfp4, modelopt", "relative error", "gate", "down"):
            assert text in table
        assert cli("run", out, "123+456=", "--device", "cpu")[1].strip().endswith("579")

    def test_it_is_calibrated_with_text(self, cli: Cli, source: Path, tmp_path: Path) -> None:
        texts = tmp_path / "texts.jsonl"
        texts.write_text('{"prompt": "123+456=", "answer": "579"}\n' * 20)
        options = ("--format", "nvfp4", "--out", tmp_path / "out", "--calibrate", texts, "--device", "cpu")
        code, table, err = cli("quantize", source, *options)
        assert code == 0
        assert "weighted error" in table
        assert re.search(r"\d+ tokens in 20 texts; \d+ experts were given too few of them", err)
        assert cli("quantize", source, *options[:2], "--out", tmp_path / "b", "--calibrate", tmp_path)[0] == 2

    def test_who_reads_the_result_is_said_first(self, cli: Cli, source: Path, tmp_path: Path) -> None:
        err = cli("quantize", source, "--format", "mxfp4", "--out", tmp_path / "out")[2]
        assert err.splitlines()[:2] == [
            "vLLM 0.32.0 reads this format, for models that it has",
            "Transformers 5.23.0 alone reads it, and expands the experts to 16 bits",
        ]

    def test_json_is_the_report(self, cli: Cli, source: Path, tmp_path: Path) -> None:
        code, text, _ = cli("quantize", source, "--format", "mxfp4", "--out", tmp_path / "out", "--json")
        assert code == 0
        assert json.loads(text) == json.loads((tmp_path / "out" / "report.json").read_text())

    def test_a_full_disk(self, cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from polymoe.checkpoint import quantize

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(quantize._ShardFile, "write", full)
            code, out, err = cli("quantize", source, "--format", "mxfp4", "--out", tmp_path / "out")
        assert (code, out) == (1, "")
        assert "the same command continues" in err
        assert "No space left on device" in err
        assert cli("quantize", source, "--format", "mxfp4", "--out", tmp_path / "out")[0] == 0

    def test_a_wrong_dialect(self, cli: Cli, source: Path, tmp_path: Path) -> None:
        options = ("--format", "mxfp4", "--dialect", "deepseek", "--out", tmp_path / "out")
        code, _, err = cli("quantize", source, *options)
        assert code == 2
        assert "--dialect: expected compressed-tensors" in err


TYPOS = (
    ["serve", "/no/such/dir"],
    ["run", "nope", "1+1="],
    ["chat", "nope"],
    ["verify", "nope"],
    ["quantize", "nope", "--format", "mxfp4", "--out", "new"],
    ["run", "demo", "1+1=", "--device", "rtx4090"],
)


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_a_typo_is_said_before_torch_is_imported() -> None:
    """Each in a fork of a process that has imported the command line alone."""
    code = (
        "import os, sys\n"
        "from polymoe.cli import main\n"
        f"for arguments in {TYPOS}:\n"
        "    if os.fork():\n"
        "        assert os.waitstatus_to_exitcode(os.wait()[1]) in (1, 2)\n"
        "        continue\n"
        "    sys.argv = ['polymoe', *arguments]\n"
        "    try: main()\n"
        "    finally: print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0
    assert [line[:7] for line in run.stderr.splitlines() if not line.startswith("  ")] == ["error: "] * len(TYPOS)
    assert run.stdout == "[]\n" * len(TYPOS)


@pytest.mark.parametrize("arguments", [["--help"], ["quantize", "-h"]])
def test_help_is_fast_and_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['polymoe', *{arguments}]\n"
        "from polymoe.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'safetensors') if m in sys.modules])"
    )
    before = os.times()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    assert run.stdout.endswith("[]\n")
    assert ("explain" if arguments == ["--help"] else "--format") in run.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.5


def test_an_interrupt_of_the_imports_leaves_no_traceback() -> None:
    """Ctrl-C within the first moments, while the command line is imported."""
    code = (
        "import sys, polymoe.__main__\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "polymoe.__main__.main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
def test_closed_streams_are_no_traceback(tmp_path: Path) -> None:
    code = "from polymoe.cli import main; main()"
    log = tmp_path / "log"
    shell = f'"$0" -c "{code}" explain openai/gpt-oss-20b --device h200'
    for closed in (f"<&- >&- 2>{log}", "<&- >&- 2>&-"):
        assert subprocess.run(["sh", "-c", f"{shell} {closed}", sys.executable]).returncode == 0
    assert log.read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("args", [("--version",), ("explain", SUMS, "--json"), ("explain", SUMS)])
def test_what_a_full_disk_did_not_take_is_lost(
    args: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the output is longer than its buffer or not."""
    with open("/dev/full", "w") as full:  # closing it at the end would fail with anything left in the buffer
        assert into(full, monkeypatch, *args) == 1
    assert "No space left" in capsys.readouterr().err


def test_the_installed_command() -> None:
    script = Path(sys.executable).parent / "polymoe"
    if not script.exists():
        pytest.skip("polymoe is not installed, only on the path")
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout == "0.1.0\n"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise")
@pytest.mark.parametrize("args", [("--version",), ("explain", SUMS, "--json"), ("explain", SUMS)])
def test_a_reader_that_has_left_is_no_error(
    args: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the output is longer than its buffer or not."""
    here, there = os.pipe()
    os.close(here)
    with open(there, "w") as stdout:  # closing it at the end would fail with anything left in the buffer
        assert into(stdout, monkeypatch, *args) == 0
    assert capsys.readouterr().err == ""
