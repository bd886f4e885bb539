"""``polymoe bench decode``: what is timed is right, its bytes are counted, and what fails is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polymoe.bench import decode
from polymoe.bench.model_bytes import experts_modules, held_bytes, step_bytes
from polymoe.engines.transformers import load
from polymoe.engines.transformers.dequantized import load_dequantized
from polymoe.errors import UnsupportedProblem
from polymoe.experts import FusedExperts

MODELS = Path(__file__).parents[2] / "models"
SUMS = MODELS / "sums-gpt-oss-mxfp4"
SMALL = ("--device", "cpu", "--prompt-len", 12, "--steps", 3, "--repeats", 1, "--prefill-len", 20)

Cli = Callable[..., tuple[int, str, str]]


def test_packed_beside_dequantized(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, "--batch-size", "1,3", "--out", out, "--commit", "abc")
    assert code == 0, stderr
    for text in ("packed", "reference", "grouped_mm", "batched_mm", "weights, packed over dequantized: 0.3"):
        assert text in stdout
    assert "prefill of 20 tokens, tokens/s, packed over the fastest dequantized" in stdout
    assert "nominal rates" in stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    done = [(r["experts"], r["implementation"], r["phase"], r["batch"]) for r in records]
    assert done == [
        ("packed", "reference", "decode", 1),
        ("packed", "reference", "decode", 3),
        ("packed", "reference", "prefill", 1),
        ("dequantized", "grouped_mm", "decode", 1),
        ("dequantized", "grouped_mm", "decode", 3),
        ("dequantized", "grouped_mm", "prefill", 1),
        ("dequantized", "batched_mm", "decode", 1),
        ("dequantized", "batched_mm", "decode", 3),  # six copies of eight experts; the prefill's forty are left out
    ]
    for r in records:
        assert r["tokens_per_second"] == pytest.approx(
            1e6 * (r["batch"] if r["phase"] == "decode" else r["tokens"]) / r["median_us"], rel=1e-3
        )
        assert (r["difference"] is None) == (r["experts"] == "packed" or r["phase"] == "prefill")
        assert (r["floor_us"] is None) == (r["phase"] == "prefill")
    assert records[0]["experts_read"] == 2
    assert 2 < records[1]["experts_read"] <= 6


def test_a_record_names_the_backends_of_its_token_count() -> None:
    model, _ = load(SUMS, device="cpu")
    layers: list[Any] = [module for module in model.modules() if isinstance(module, FusedExperts)]
    selection = layers[0].explain()
    [step] = selection.require().steps
    steps = (replace(step, max_tokens=8, backend="small"), replace(step, backend="large"))
    mixed = replace(selection, plan=replace(selection.require(), steps=steps))
    for layer in layers:
        layer.explain = lambda: mixed
    assert [decode._backends(model, tokens) for tokens in (1, 8, 9)] == ["small", "small", "large"]


def test_json_of_one_way_has_no_ratios(cli: Cli) -> None:
    code, stdout, _ = cli("bench", "decode", SUMS, *SMALL, "--experts", "packed", "--batch-size", 1, "--json")
    found = json.loads(stdout)
    assert code == 0
    assert [r["phase"] for r in found["records"]] == ["decode", "prefill"]
    assert found["packed_to_dequantized"] == []


def test_other_logits_are_not_timed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        model = load_dequantized(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[2].mlp.experts.down_proj.mul_(1.5)
        return model

    monkeypatch.setattr("polymoe.engines.transformers.dequantized.load_dequantized", wrong)
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, "--batch-size", 2)
    assert code == 1
    assert "dequantized (grouped_mm), batch 2: logits: expected logits within 0.05" in stderr
    assert "not timed" in stderr
    assert "dequantized" not in stdout


def test_what_transformers_cannot_run_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, model: Any, experts: str, *args: Any) -> Any:
        if experts == "dequantized":
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return kept(self, model, experts, *args)

    kept = decode.ModelBench.decode
    monkeypatch.setattr(decode.ModelBench, "decode", fail)
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, "--batch-size", 1, "--implementations", "grouped_mm")
    assert code == 0
    assert "not measured: dequantized, grouped_mm, decode, batch 1: CUDA out of memory" in stderr
    assert "prefill of 20 tokens" in stdout


def test_a_packed_prefill_that_fails_leaves_the_rest(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, model: Any, experts: str, *args: Any) -> Any:
        if experts == "packed":
            raise RuntimeError("no such kernel")
        return kept(self, model, experts, *args)

    kept = decode.ModelBench.prefill
    monkeypatch.setattr(decode.ModelBench, "prefill", fail)
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, "--batch-size", 1, "--implementations", "grouped_mm")
    assert code == 0
    assert "not measured: packed, reference, prefill, batch 1: no such kernel" in stderr
    assert "decode at batch 1, tokens/s, packed over the fastest dequantized" in stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((SUMS, "--experts", "int8"), 2, "--experts: expected packed, dequantized, or both, got 'int8'"),
        ((SUMS, "--batch-size", "0"), 2, "--batch-size: expected numbers"),
        ((SUMS, "--device", "cpu", "--graphs"), 2, "--graphs: expected a GPU"),
        ((SUMS, *SMALL, "--prefill-attention", "flash_attention_9"), 2, "--prefill-attention: got 'flash_attention_9'"),
        ((SUMS, "--device", "cpu", "--prompt-len", 250), 2, "at most 256, the model's context"),
        ((MODELS / "sums-nemotron-h-nvfp4", "--device", "cpu", "--experts", "dequantized"), 1, "--experts packed"),
        ((MODELS / "none", "--device", "cpu"), 1, "none"),
    ],
)
def test_bad_input(cli: Cli, args: tuple[Any, ...], code: int, message: str) -> None:
    found, stdout, stderr = cli("bench", "decode", *args)
    assert (found, "dequantized" in stdout) == (code, False)
    assert message in stderr


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_of_a_step_are_all_weights_when_all_experts_are_read(packed: bool) -> None:
    device = torch.device("cpu")
    model = load(SUMS, device="cpu")[0] if packed else load_dequantized(SUMS, device=device)
    layers, experts = len(experts_modules(model)), 8
    assert layers == 4
    everything = held_bytes(model)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    cache = 2 * 3 * (2 * 8 + 2 * 100) * 2 * 32 * 2  # two of four layers have a window of 8; two heads of 32, bfloat16
    expected = everything - (vocabulary - 3) * hidden * 2 + cache
    # Packed layers may hold a few bytes beside what the checkpoint has.
    assert step_bytes(model, 3, 100, layers * experts) == pytest.approx(expected, rel=2e-3 if packed else 1e-9)
    few, more = (step_bytes(model, 1, 1, count) for count in (8, 9))
    one = 3 * 192 * 192 * (4.25 / 8 if packed else 2) + 3 * 192 * 2
    assert more - few == pytest.approx(one)


def test_dequantizing_is_transformers_own_or_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="expected fp8 or mxfp4, got quantization 'awq'"):
        load_dequantized(MODELS / "sums-mixtral-awq", device=torch.device("cpu"))
    model = load_dequantized(MODELS / "sums-qwen3-fp8", device=torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
