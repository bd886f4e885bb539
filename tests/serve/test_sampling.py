"""Which token is next: by definition, whatever the other rows of a step are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from polymoe.serve.sampling import TokenSampler, choose_tokens, end_tokens, greedy_config, with_defaults
from polymoe.serve.settings import GenerationSettings

PLAIN = SimpleNamespace(
    do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None, repetition_penalty=None, max_new_tokens=None
)
SAMPLING = SimpleNamespace(
    **{**vars(PLAIN), "do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": 4000}
)
VOCABULARY = 12


def settings(**fields: Any) -> GenerationSettings:
    return with_defaults(replace(GenerationSettings(), **fields), PLAIN)


def logits(rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(1))


def changed(sampler: TokenSampler, answer: list[int]) -> Tensor:
    """The logits of the token after an answer."""
    for token in answer:
        sampler.change(logits()[0].clone())
        sampler.chosen(torch.tensor([token]), 0)
    row = logits()[0].clone()
    sampler.change(row)
    return row


def test_what_a_request_does_not_say_is_the_checkpoints() -> None:
    assert with_defaults(GenerationSettings(), PLAIN) == GenerationSettings(
        max_tokens=1024, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
    )
    own = with_defaults(GenerationSettings(), SAMPLING)
    assert (own.temperature, own.top_k, own.max_tokens) == (0.7, 20, 4000)
    said = GenerationSettings(temperature=0.0, top_k=3, max_tokens=5)
    assert with_defaults(said, SAMPLING).temperature == 0
    assert with_defaults(said, SAMPLING).top_k == 3
    assert with_defaults(GenerationSettings(), PLAIN, temperature=0.5).temperature == 0.5  # the operator's
    assert with_defaults(said, PLAIN, temperature=0.5).temperature == 0


def test_transformers_does_nothing_of_what_samplers_do() -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, eos_token_id=[1, 2],
        suppress_tokens=[3],
    )  # fmt: skip
    before = config.to_dict()
    found = greedy_config(config)
    assert (found.do_sample, found.repetition_penalty, found.suppress_tokens) == (False, 1.0, [3])
    assert config.to_dict() == before
    assert (end_tokens(config), end_tokens(GenerationConfig(eos_token_id=5))) == ((1, 2), (5,))


def test_penalties_are_openais() -> None:
    prompt, answer = [4, 4, 5], [1, 2, 1, 1]
    got = changed(TokenSampler(settings(frequency_penalty=0.5, presence_penalty=0.25), prompt), answer)
    counts = Counter(answer)
    expected = [logits()[0, j] - counts[j] * 0.5 - (counts[j] > 0) * 0.25 for j in range(VOCABULARY)]
    torch.testing.assert_close(got, torch.stack(expected))


def test_the_repetition_penalty_is_transformers() -> None:
    prompt, answer = [4, 4, 5], [1, 2, 1]
    got = changed(TokenSampler(settings(repetition_penalty=1.7), prompt), answer)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + answer]), logits())
    torch.testing.assert_close(got, expected[0])


def test_a_bias_and_a_minimum_length() -> None:
    sampler = TokenSampler(settings(logit_bias={3: 2.5}, min_tokens=2), [1], ends=(7, 8))
    for count in range(3):
        row = logits()[0].clone()
        sampler.change(row)
        assert row[3] == logits()[0, 3] + 2.5
        assert torch.isinf(row[[7, 8]]).all() == (count < 2)
        sampler.chosen(torch.tensor([0]), 0)


def test_tokens_that_are_dropped_do_not_count() -> None:
    penalties = settings(frequency_penalty=0.5, repetition_penalty=1.3, logprobs=0)
    sampler = TokenSampler(penalties, [4])
    for _ in range(4):
        choose_tokens(logits(), [sampler])
    sampler.restart([1, 2])
    assert (sampler.count, len(sampler.logprobs)) == (2, 2)
    torch.testing.assert_close(changed(sampler, []), changed(TokenSampler(penalties, [4]), [1, 2]))


@pytest.mark.parametrize(
    "fields", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.7, "min_p": 0.1}], ids=str
)
def test_only_what_transformers_would_keep_is_sampled(fields: dict[str, Any]) -> None:
    scores = logits() / 2.0
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    for name, value in fields.items():
        scores = warpers[name](value)(torch.tensor([[0]]), scores)  # type: ignore[arg-type]
    samplers = [TokenSampler(settings(temperature=2.0, **fields), [0]) for _ in range(4000)]
    got = choose_tokens(logits().repeat(len(samplers), 1), samplers)
    shares = torch.bincount(got, minlength=VOCABULARY) / len(samplers)
    torch.testing.assert_close(shares, scores.softmax(-1)[0], rtol=0, atol=0.03)
    assert set(shares.nonzero().flatten().tolist()) <= set((scores[0] > -torch.inf).nonzero().flatten().tolist())


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    """And another one for each answer, and for each of its tokens."""

    def drawn(seed: int | None, number: int = 0, others: int = 0, first: int = 0) -> list[int]:
        sampler = TokenSampler(settings(temperature=5.0, seed=seed), [0], number=number)
        company = [TokenSampler(settings(temperature=1.0, top_k=2), [0]) for _ in range(others)]
        tokens = []
        for step in range(12):
            if step == first:
                sampler.restart(tokens)  # what ran ahead comes again
            rows = logits().repeat(others + 1, 1)
            tokens.append(int(choose_tokens(rows, [*company, sampler])[-1]))
        return tokens

    assert drawn(3) == drawn(3, others=0, first=5) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(3) != drawn(3, number=1)
    assert len(set(drawn(3))) > 3
    assert len({tuple(drawn(None)) for _ in range(3)}) > 1


def test_rows_do_not_depend_on_each_other() -> None:
    rows = logits(5)
    kinds = [settings(), settings(temperature=1.0, seed=1), settings(logit_bias={2: 50.0}), settings(logprobs=2),
             settings(temperature=1.0, seed=1, min_p=1.0, logprobs=3)]  # fmt: skip
    alone = [int(choose_tokens(rows[i : i + 1].clone(), [TokenSampler(kind, [0])])) for i, kind in enumerate(kinds)]
    samplers = [TokenSampler(kind, [0]) for kind in kinds]
    assert choose_tokens(rows.clone(), samplers).tolist() == alone
    assert alone[0] == int(rows[0].argmax())
    assert alone[2] == 2
    assert alone[4] == int(rows[4].argmax())
    assert [len(sampler.logprobs) for sampler in samplers] == [0, 0, 0, 1, 1]


def test_logprobs_are_the_models_own() -> None:
    """Not those of what a bias, a penalty or a temperature makes of them."""
    rows = logits(2)
    rows[1, 4] = -torch.inf
    samplers = [
        TokenSampler(settings(logprobs=2, logit_bias={5: 90.0}), [0]),
        TokenSampler(settings(logprobs=VOCABULARY, temperature=3.0), [0]),
    ]
    ids = choose_tokens(rows.clone(), samplers).tolist()
    assert ids[0] == 5
    for row, sampler in enumerate(samplers):
        expected = rows[row].log_softmax(-1).clamp(min=-9999)
        [(step, place)] = sampler.logprobs
        (chosen, value), *top = step.row(place, sampler.settings.logprobs or 0)
        assert (chosen, value) == (ids[row], pytest.approx(float(expected[chosen])))
        assert [token for token, _ in top] == expected.topk(len(top)).indices.tolist()
        assert [v for _, v in top] == pytest.approx(expected.topk(len(top)).values.tolist())
