"""readers: who reads what quantize writes; and Transformers, which runs here, does."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from polymoe.checkpoint.dialects import DIALECTS
from polymoe.checkpoint.layer import StoredLayer
from polymoe.checkpoint.quantize import DIALECTS_OF, quantize_checkpoint
from polymoe.engines.readers import TRANSFORMERS, readers
from polymoe.engines.serving.preview import ENGINES
from polymoe.engines.transformers.generator import Generator

MODELS = Path(__file__).parents[2] / "models"
sys.path.append(str(MODELS))
WAYS = [(format, dialect) for format, dialects in DIALECTS_OF.items() for dialect in dialects if dialect != "gpt-oss"]
READERS = {
    ("mxfp4", "compressed-tensors"): ["vLLM", "Transformers"],
    ("nvfp4", "compressed-tensors"): ["vLLM", "SGLang"],
    ("nvfp4", "modelopt"): ["vLLM", "SGLang"],
    ("int4_g32", "compressed-tensors"): ["vLLM", "SGLang", "Transformers"],
    ("int4_g128", "compressed-tensors"): ["vLLM", "SGLang", "Transformers"],
    ("fp8_block128", "deepseek"): ["vLLM", "SGLang", "Transformers"],
    ("mxfp8", "compressed-tensors"): ["vLLM"],
    ("mxfp8", "modelopt"): ["vLLM"],
}


@pytest.mark.parametrize(("format", "dialect"), WAYS)
def test_readers_are_named_and_transformers_answers_the_same(
    bf16: Path, tmp_path: Path, format: str, dialect: str
) -> None:
    """Transformers' own loader, without polymoe, dequantizes the file and gives the same answers."""
    from dequantized import own

    said: list[str] = []

    def begin(layers: Sequence[StoredLayer], stacked: bool) -> None:
        assert not stacked
        said.extend(readers(layers, stacked=stacked))
        assert "no engine but polymoe" in readers(layers, stacked=True)[0]

    quantize_checkpoint(bf16, format, tmp_path / "out", dialect=dialect, begin=begin)
    assert [sentence.split()[0] for sentence in said] == READERS[format, dialect]
    if "Transformers" not in READERS[format, dialect]:
        return
    # Transformers dequantizes FP8 to the dtype of its scales, whatever the model's.
    model = own(tmp_path / "out", torch.float32).float()
    ours = Generator.load(str(tmp_path / "out"), device="cpu")
    theirs = Generator(model, ours.tokenizer)
    rows = [json.loads(line) for line in (MODELS / "sums-heldout.jsonl").read_text().splitlines()[:40]]
    prompts = [row["prompt"] for row in rows if len(row["prompt"]) == 8]
    assert len(prompts) > 20
    answers = [[a.text for a in g.answer(prompts, max_tokens=8)] for g in (theirs, ours)]
    assert answers[0] == answers[1] == [row["answer"] for row in rows if len(row["prompt"]) == 8]


@pytest.mark.parametrize(("format", "wrong"), [("int4_g32", False), ("int4_g128", True), ("fp8_block128", False)])
def test_marlin_of_vllm_needs_two_groups_a_row_of_down(bf16: Path, format: str, wrong: bool) -> None:
    """The model has H 256 and F 128: by 128, rows of gate have two groups and rows of down have one."""
    said: list[str] = []

    def begin(layers: Sequence[StoredLayer], stacked: bool) -> None:
        said.extend(readers(layers, stacked=stacked))
        raise InterruptedError  # before anything is written

    with pytest.raises(InterruptedError):
        quantize_checkpoint(bf16, format, bf16.parent / "not-written", begin=begin)
    vllm = next(sentence for sentence in said if sentence.startswith("vLLM"))
    assert ("only with polymoe where a rank's experts have 128 intermediate columns" in vllm) == wrong


def test_names_are_known() -> None:
    from polymoe.engines import readers as module

    assert TRANSFORMERS.startswith("Transformers 5.")
    assert module._TRANSFORMERS.keys() <= DIALECTS.keys()
    for engine in ENGINES.values():
        assert engine.unread <= engine.methods.keys()
        assert engine.limits.keys() <= engine.methods.keys()


def test_the_document_has_the_same_table() -> None:
    text = (MODELS.parent / "docs" / "quantizing.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    header = next(row for row in rows if row[0] == "format, dialect")
    assert header[1:] == [*(f"{e.name} {e.tested}" for e in ENGINES.values()), f"{TRANSFORMERS} alone"]
    for (format, dialect), names in READERS.items():
        title = f"{format.partition('_')[0].upper()}, `{dialect}`"
        row = next(row for row in rows if row[0] == title)
        read = [name.split()[0] for name, cell in zip(header[1:], row[1:], strict=True) if cell != "no"]
        assert read == names, title
