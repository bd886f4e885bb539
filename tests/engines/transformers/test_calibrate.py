"""calibrate: inputs of experts are measured by one pass, and weigh the errors of quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.calibration import LEAST_TOKENS, Calibration, InputSquares, Texts
from polymoe.checkpoint.quantize import SEARCHED_FORMATS, quantize_checkpoint
from polymoe.engines.transformers import calibrate as module
from polymoe.engines.transformers.calibrate import calibrate
from polymoe.errors import ArgumentError, CheckpointError
from support.requantized import SOURCE

QUESTIONS = Path(__file__).parents[3] / "models" / "sums-heldout.jsonl"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    rows = [*QUESTIONS.read_text().splitlines()[:100], '{"text": "1+2=3"}']
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("\n".join(rows))
    return Texts.read(file)


@pytest.fixture(scope="module")
def measured(bf16: Path, texts: Texts) -> Calibration:
    return calibrate(bf16, texts, device="cpu")


def test_sums_are_those_of_transformers_own_experts(
    bf16: Path, texts: Texts, measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of one pass, computed again by the module's own code."""
    calls: list[tuple[Any, Tensor, Tensor, Tensor, Tensor]] = []
    forward = module._experts_forward

    def spy(found: Any, experts: nn.Module, *args: Tensor, **others: Any) -> Tensor:
        out = forward(found, experts, *args, **others)
        calls.append((experts, *args, out))
        return out

    monkeypatch.setattr(module, "_experts_forward", spy)
    again = calibrate(bf16, texts, device="cpu")
    layers = {id(experts): n for n, experts in enumerate(dict.fromkeys(call[0] for call in calls))}
    expected = {n: [torch.zeros(5), torch.zeros(5, 256), torch.zeros(5, 128)] for n in layers.values()}
    for experts, x, ids, weights, out in calls:
        wanted = type(experts).forward.__wrapped__(experts, x, ids, weights)
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
        tokens, sums_x, sums_h = expected[layers[id(experts)]]
        for row, chosen in zip(x, ids, strict=True):
            for e in chosen.tolist():
                gate, up = (experts.gate_up_proj[e] @ row).float().chunk(2)
                tokens[e] += 1
                sums_x[e] += row.float().square()
                sums_h[e] += (nn.functional.silu(gate) * up).square()
    for layer, (tokens, sums_x, sums_h) in expected.items():
        squares = again.layers[layer, 0]
        assert squares.tokens_E.tolist() == tokens.tolist()
        torch.testing.assert_close(squares.gate_up_EH.float(), sums_x, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(squares.down_EF.float(), sums_h, rtol=3e-2, atol=1e-2 * float(sums_h.max()))
        for name, tensor in squares.sums().items():
            assert torch.equal(measured.layers[layer, 0].sums()[name], tensor)  # the same in every run
    assert (again.texts.file.name, again.texts.lines[-1], len(again.texts.lines)) == ("texts.jsonl", "1+2=3", 101)
    assert again.tokens * 2 == sum(int(squares.tokens_E.sum()) for squares in again.layers.values()) / 4


@pytest.mark.parametrize("format", SEARCHED_FORMATS)
def test_weighted_errors_are_lower(bf16: Path, tmp_path: Path, measured: Calibration, format: str) -> None:
    report = quantize_checkpoint(bf16, format, tmp_path / "with", calibrate=lambda: measured)
    quantize_checkpoint(bf16, format, tmp_path / "without")
    exact, ours, plain = (Checkpoint.open(path) for path in (bf16, tmp_path / "with", tmp_path / "without"))
    for layer in exact.layers:
        squares = measured.layers[layer, 0]
        errors: dict[str, list[list[float]]] = {}
        for e in range(exact.moe.experts):
            for name, matrix in exact.weights(layer).expert(e).projections.items():
                sums = squares.sums()["down" if name == "down" else "gate_up"][e]
                wanted, m = matrix.dequantize().double(), sums / squares.tokens_E[e]
                m = m + 0.01 * m.mean()
                each = [c.weights(layer).expert(e).projections[name].dequantize().double() for c in (ours, plain)]
                found = [float((((q - wanted) ** 2 * m).sum() / (wanted**2 * m).sum()) ** 0.5) for q in each]
                errors.setdefault(name, []).append(found)
        for name, found in errors.items():
            ours_, plain_ = (sum(x**2 for x in column) ** 0.5 for column in zip(*found, strict=True))
            # The inputs of gate and up come out of a norm, so that their columns are nearly alike. MXFP4 chooses
            # between two scales only.
            assert ours_ < plain_ * (0.98 if name == "down" and format != "mxfp4" else 1), (layer, name)
            weighted = report["layers"][layer][name]["weighted_error"]
            assert weighted == pytest.approx(ours_ / len(found) ** 0.5, abs=2e-5)
    assert report["calibration"] == {"file": "texts.jsonl", "texts": 101, "tokens": measured.tokens}


def test_experts_without_enough_tokens_are_counted_and_not_weighted(bf16: Path, texts: Texts, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([LEAST_TOKENS, LEAST_TOKENS - 1, 0, 100, 5], dtype=torch.float64)
    squares = InputSquares(
        tokens, *(torch.rand(5, n, generator=generator).double().pow(4) * tokens[:, None] for n in (256, 128))
    )
    found = Calibration(texts, 1, {(layer, 0): squares for layer in range(4)})
    report = quantize_checkpoint(bf16, "int4_g32", tmp_path / "with", calibrate=lambda: found)
    quantize_checkpoint(bf16, "int4_g32", tmp_path / "without")
    assert [row["experts_without_tokens"] for row in report["layers"]] == [3] * 4
    with Checkpoint.open(tmp_path / "with") as ours, Checkpoint.open(tmp_path / "without") as plain:
        same = [
            torch.equal(*(c.weights(1).expert(e).down.scales for c in (ours, plain))) for e in range(ours.moe.experts)
        ]
    assert same == [False, True, True, False, True]


def test_another_calibration_does_not_continue(bf16: Path, tmp_path: Path, measured: Calibration) -> None:
    out = tmp_path / "out"

    def interrupt(text: str) -> None:
        if text == "layer 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(bf16, "mxfp4", out, calibrate=lambda: measured, progress=interrupt)
    with pytest.raises(CheckpointError, match="got another"):
        quantize_checkpoint(bf16, "mxfp4", out)
    assert "calibration" in quantize_checkpoint(bf16, "mxfp4", out, calibrate=lambda: measured)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no line"),
        (b"\n\n", "no line"),
        (b'{"text": "  "}\n', r"line 1: expected JSON objects in lines.*with text"),
        (b'{"text": "1+2="}\n{"story": "x"}\n', "line 2: expected JSON objects in lines, with text"),
        (b'{"text": 5}\n', "line 1: expected"),
        (b"[1]\n", "line 1: expected"),
        (b"plain\n", "line 1: expected .*, got 'plain'"),
        (b"\xff\xfe", "can't decode"),
        (b'{"text": "1+2="}\n', r"at least one expert 32 tokens, got 4 tokens in 1 texts"),
    ],
)
def test_files_that_measure_nothing(bf16: Path, tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        quantize_checkpoint(
            bf16, "mxfp4", tmp_path / "out", calibrate=lambda: calibrate(bf16, Texts.read(file), device="cpu")
        )
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"none\.jsonl: expected a file that can be read, got No such file"):
        Texts.read(tmp_path / "none.jsonl")


def test_formats_without_a_search(bf16: Path, tmp_path: Path, measured: Calibration) -> None:
    with pytest.raises(ArgumentError, match=r"calibrate: expected mxfp4 or .*, got fp8_block128"):
        quantize_checkpoint(bf16, "fp8_block128", tmp_path / "out", calibrate=lambda: measured)


def test_experts_that_are_quantized(texts: Texts) -> None:
    with pytest.raises(CheckpointError, match="experts in 16 bits, got fp8"):
        calibrate(SOURCE, texts, device="cpu")


def test_the_model_is_left_as_it_was(bf16: Path, texts: Texts) -> None:
    from transformers.integrations.moe import ExpertsInterface

    calibrate(bf16, texts, device="cpu")
    assert module._NAME not in ExpertsInterface._global_mapping
