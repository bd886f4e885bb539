"""QuantizedReader: experts that are quantized together, as on GPUs, here on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polymoe.checkpoint import Checkpoint, quantized
from polymoe.checkpoint.quantized import QUANTIZED_FORMATS, QuantizedReader, quantize_expert
from polymoe.errors import FormatError
from polymoe.formats import FORMATS
from polymoe.formats.base import Format
from polymoe.problem.tensors import Expert
from support.problems import random_experts

CPU = torch.device("cpu")
MODELS = Path(__file__).parents[2] / "models"
COUNT = 11
BLOCK = 4


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_TOGETHER_ON", ("cpu",))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices each call of ``Format.quantize`` got."""
    found: list[int] = []
    quantize = Format.quantize

    def counted(self: Format, w_NK: Tensor, importance_K: Tensor | None = None) -> object:
        found.append(w_NK[..., 0, 0].numel())
        return quantize(self, w_NK, importance_K)

    monkeypatch.setattr(Format, "quantize", counted)
    return found


class Source:
    """Experts in 16 bits, which counts how often each is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gated: bool = True, block: int = BLOCK) -> None:
        self.weights = random_experts("bf16", experts=COUNT, hidden=128, intermediate=256, gated=gated, bias=True)
        self.changed: dict[int, Expert] = {}
        self.reads: list[int] = []
        monkeypatch.setattr(quantized, "_TOGETHER_WEIGHTS", block * self.weights.spec.dequantized_bytes // 2 // COUNT)

    def read(self, e: int, check: bool) -> Expert:
        self.reads.append(e)
        return self.changed.get(e) or self.weights.expert(e)

    def reader(self, format: str, experts: range = range(COUNT)) -> QuantizedReader:
        encodings = dict.fromkeys(("gate", "up", "down"), FORMATS[format].encoding)
        return QuantizedReader(self.read, encodings, lambda e, part: f"experts.{e}.{part}", experts, CPU)

    def alone(self, e: int, format: str) -> Expert:
        encodings = dict.fromkeys(("gate", "up", "down"), FORMATS[format].encoding)
        return quantize_expert(self.changed.get(e) or self.weights.expert(e), encodings, str)


def same(expert: Expert, other: Expert) -> bool:
    parts, others = expert.parts(), other.parts()
    return parts.keys() == others.keys() and all(
        part.dtype == others[name].dtype
        and torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (part, others[name])))
        for name, part in parts.items()
    )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
def test_the_bits_are_those_of_each_alone(
    format: str, gated: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(monkeypatch, gated=gated)
    calls.clear()
    read = source.reader(format)
    found = [read(e, check=False) for e in range(COUNT)]
    halves = 2 if gated and format != "nvfp4" else 1  # NVFP4's gate and up are one matrix, with one global scale
    assert calls == [n for size in (4, 4, 3) for n in (size, size * halves)]
    assert sorted(source.reads) == list(range(COUNT))
    assert all(same(found[e], source.alone(e, format)) for e in range(COUNT))


def test_any_order_gives_the_same_experts(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(monkeypatch)
    read = source.reader("mxfp4", range(2, COUNT))
    order = [7, 2, 3, 9, 4, 5, 6, 10, 2, 3, 4]
    assert all(same(read(e, check=False), source.alone(e, "mxfp4")) for e in order)
    checked = source.reader("mxfp4")
    calls.clear()
    assert same(checked(0), checked(0, check=False))
    assert calls[:2] == [1, 2]  # with checks it is read alone


def test_an_expert_that_is_larger_than_a_block_is_quantized_alone(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(monkeypatch, block=0)
    calls.clear()
    read = source.reader("mxfp4")
    found = [read(e, check=False) for e in range(3)]
    assert calls == [1, 2] * 3
    assert all(same(found[e], source.alone(e, "mxfp4")) for e in range(3))
    assert len(source.reads) == 4  # one ahead


def test_the_expert_whose_weights_are_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(monkeypatch)
    broken = source.weights.expert(6)
    codes = broken.down.codes.clone()
    codes[3, 5] = float("nan")
    source.changed[6] = replace(broken, down=replace(broken.down, codes=codes))
    read = source.reader("nvfp4")
    for e in range(6):
        assert same(read(e, check=False), source.alone(e, "nvfp4"))
    with pytest.raises(FormatError, match=r"(?s)experts\.6\.down: expected finite float32 weights, got NaN.*fetch or"):
        read(6, check=False)
    assert same(read(7, check=False), source.alone(7, "nvfp4"))


@pytest.mark.parametrize("ranks", [{}, {"tp": (1, 2)}, {"ep": (1, 2)}], ids=["whole", "tp", "ep"])
@pytest.mark.parametrize("model", ["sums-olmoe", "sums-qwen3-next"])
def test_layers_of_a_checkpoint(model: str, ranks: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(MODELS / model, experts="mxfp4")
    weights = checkpoint.weights(1, **ranks)
    found = [weights.peek(e) for e in range(weights.spec.local_experts)]
    monkeypatch.setattr(quantized, "_TOGETHER_ON", ())
    alone = checkpoint.weights(1, **ranks).expert
    assert all(same(expert, alone(e)) for e, expert in enumerate(found))
