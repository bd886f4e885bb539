"""Generator: batches of answers, with and without a static cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from polymoe.engines.transformers import load
from polymoe.engines.transformers.generator import Generator
from support.packed_model import CHECKPOINT


def test_answers_over_a_static_cache_are_the_same() -> None:
    model, tokenizer = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    prompts = ["123+456=", "7-12=", "100+99="]
    plain, static = Generator(model, tokenizer), Generator(model, tokenizer, graphs=True)
    expected = plain.answer(prompts, max_tokens=6)
    assert [answer.text for answer in expected] == ["579", "-5", "199"]
    assert static.answer(prompts, max_tokens=6) == expected
    assert model._previous_max_cache_length == 1024  # one size for prompts of many lengths
