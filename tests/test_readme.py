"""README and the documents of docs/: examples run, commands parse, links and paths exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from polymoe.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted({*ROOT.glob("*.md"), ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")})
LINKING = [*DOCUMENTS, *sorted((ROOT / "benchmarks/experiments").rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.S)
INPUTS = """
import torch
x_TH = torch.randn(3, 192)
topk_ids_TA = torch.tensor([[0, 5]] * 3)
topk_weights_TA = torch.full((3, 2), 0.5)
w_NK = torch.randn(64, 64)
"""
"""What the examples use without defining it, in the sizes of models/sums-gpt-oss-mxfp4."""


@pytest.mark.slow
def test_the_examples_run_in_one_session(tmp_path: Path) -> None:
    """In a process of its own, since `install` changes what Transformers does from then on."""
    assert len(EXAMPLES) == 4
    assert len(EXAMPLES[0].splitlines()) <= 12, "a model and a chat in some ten lines"
    checks = "assert y_TH.shape == x_TH.shape and y_TH.isfinite().all()\nassert q.dequantize().shape == w_NK.shape\n"
    script = tmp_path / "readme.py"
    script.write_text("\n".join([INPUTS, *EXAMPLES, checks, "print('ran')\n"]), encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("123+456= 579\n500-499= 1\n")
    assert "Qwen/Qwen3-30B-A3B-FP8: qwen3_moe, on rtx5090" in done.stdout
    assert done.stdout.endswith("ran\n")


def commands() -> list[tuple[str, str]]:
    """Every ``$ polymoe`` line of a document, with the document's name."""
    found = []
    for path in DOCUMENTS:
        for block in re.findall(r"```console\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.S):
            for line in re.findall(r"^\$ (?:\w+=\S+ )?(polymoe .*)$", block, flags=re.M):
                found.append((path.name, line))
    return found


def test_commands_are_found() -> None:
    assert len({document for document, _ in commands()}) >= 5
    assert len([line for document, line in commands() if document == "README.md"]) >= 9


@pytest.mark.parametrize(("document", "line"), commands())
def test_commands_parse(document: str, line: str) -> None:
    """Options exist and values have the right form; nothing is run."""
    words = shlex.split(line, comments=True)
    words = words[: next((place for place, word in enumerate(words) if word in ("&", "|")), None)]
    command: Any = get_command(app)
    context = None
    rest = words[1:]
    while hasattr(command, "commands"):  # a group
        context = command.make_context("polymoe", rest, parent=context)
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(command.name, rest, parent=context)


def test_the_shown_output_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"^\$ polymoe (explain .*) \| head -5\n((?:.*\n){5})```", README, flags=re.MULTILINE)
    assert block is not None
    app(shlex.split(block[1]), standalone_mode=False)
    assert "".join(capsys.readouterr().out.splitlines(keepends=True)[:5]) == block[2]


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    anchors: dict[Path, set[str]] = {}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            anchors.setdefault(there, headings(there))
            assert anchor in anchors[there], target


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
