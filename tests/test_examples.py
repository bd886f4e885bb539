"""The programs of examples/ and the notebook run as they stand, and print what they should."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from polymoe.backends import BACKENDS

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user starts them: ``python examples/NAME.py`` in a clone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(EXAMPLES)


def output(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_one_layer(capsys: pytest.CaptureFixture[str]) -> None:
    said = output("one_layer.py", capsys)
    assert "(4, 192) -> (4, 192), torch.bfloat16" in said
    sizes = re.search(r"([\d.]+) MiB packed, ([\d.]+) MiB in 16 bit", said)
    assert sizes
    assert 3.5 < float(sizes[2]) / float(sizes[1]) < 4  # 4.25 bits a weight, and biases
    assert "reference" in said


@pytest.mark.slow
def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert output("chat.py", capsys).splitlines()[-3:] == ["123+456= 579", "500-499= 1", "77-88= -11"]


def test_explain_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    said = output("explain_gpus.py", capsys)
    assert re.findall(r"^(.*) on rtx4090: needs|^needs .*|does not fit", said, re.MULTILINE)
    assert "fits on h200" in said
    assert "36 layers: mxfp4, H=2880" in said
    assert re.search(r"^ *cuda.*SM90|triton", said, re.MULTILINE)


def test_quantize(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        row[0]: (float(row[1]), float(row[2])) for row in map(str.split, output("quantize.py", capsys).splitlines()[1:])
    }
    assert rows["mxfp4"][0] == 4.25
    assert rows["bf16"][0] == 16
    assert rows["bf16"][1] < rows["fp8_block128"][1] < rows["nvfp4"][1] < rows["mxfp4"][1] < 0.2


def test_a_custom_backend(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        said = output("custom_backend.py", capsys)
    finally:
        del BACKENDS["token-by-token"]
    assert "cpu: accepts\nh200: device: expects cpu, got cuda\n" in said
    assert "1-4 tokens: token-by-token" in said
    assert float(said.split()[-1]) < 1e-5


@pytest.mark.slow
def test_serve_and_ask(capsys: pytest.CaptureFixture[str]) -> None:
    said = output("serve_and_ask.py", capsys).splitlines()
    assert said[:2] == ["498-971= -473", "123+456= 579"]
    assert said[2].startswith("polymoe_generation_tokens_total")
    assert float(said[2].split()[-1]) >= 7


@pytest.mark.slow
def test_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells, one after the other, as a kernel runs them."""
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "quickstart.ipynb", "exec", dont_inherit=True), names)
    said = capsys.readouterr().out
    assert "fits on rtx4090" in said
    assert "torch.Size([5, 192])" in said
    for answer in ("123+456= 579", "918-273= 645", "0-7= -7"):
        assert answer in said


def test_the_notebook_has_no_outputs() -> None:
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tp", "ep"])
def test_tensor_parallel(way: str) -> None:
    """Two processes, which torchrun starts on a port of its own choice."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [str(EXAMPLES / "tensor_parallel.py"), "models/sums-qwen3-fp8", way]
    done = subprocess.run([*command, *program], capture_output=True, text=True)
    assert "123+456=579" in done.stdout, done.stderr


def test_the_task_of_lm_eval_names_fields_of_its_file() -> None:
    """``tests/test_lm_eval.py`` runs it where lm-eval is installed."""
    task = pytest.importorskip("yaml").safe_load((EXAMPLES / "lm_eval" / "sums.yaml").read_text(encoding="utf-8"))
    first = (ROOT / task["dataset_kwargs"]["data_files"]["test"]).read_text(encoding="utf-8").splitlines()[0]
    assert [task["doc_to_text"], task["doc_to_target"]] == [f"{{{{{name}}}}}" for name in json.loads(first)]


def compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *runs: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, runs)])
    return output("lm_eval/compare.py", capsys)


def samples(path: Path, right: str) -> Path:
    """What lm-eval 0.4.13 writes; one character a question: 1 is right."""
    path.parent.mkdir(exist_ok=True)
    about = {"filter": "none", "metrics": ["exact_match"]}
    rows = ({"doc_id": i, "doc_hash": "a", "exact_match": float(value), **about} for i, value in enumerate(right))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_of_lm_eval_are_compared_by_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for day, right in enumerate(("1" * 40, "1" * 30 + "0" * 10)):
        samples(tmp_path / "a" / f"samples_sums_{day}.jsonl", right)
    b = samples(tmp_path / "samples_b.jsonl", "1" * 20 + "0" * 16)
    said = compared(capsys, monkeypatch, tmp_path / "a", b)
    # Of 36 differences 20 are 0, 10 are 1 and 6 are 0.5: mean 13 / 36, deviation 0.4410.
    for text in (
        "A   91.67 % ± 3.15",
        "B   55.56 %",
        "+36.11 points, 95 % interval +21.71 to +50.52",
        "4 were answered",
    ):
        assert text in said
    assert "+0.00 points, 95 % interval -7.98 to +7.98" in compared(capsys, monkeypatch, b, b)
    few = samples(tmp_path / "few.jsonl", "1" * 29)
    with pytest.raises(SystemExit, match="at least 30 questions that both runs answered, got 29"):
        compared(capsys, monkeypatch, b, few)
