"""From settings to generation: penalties as OpenAI defines them, biases, and what requests can share."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

from polymoe.serve.sampling import Penalties, check_shared, generation_config, logits_processors
from polymoe.serve.settings import GenerationSettings
from support.serving import EVERY_WAY, Running, refused, said


def test_penalties_are_openais() -> None:
    prompt, answer = [4, 4, 5], [1, 2, 1, 1]
    scores = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    found = Penalties(len(prompt), 0.5, 0.25)(torch.tensor([prompt + answer]), scores)
    counts = Counter(answer)
    expected = [scores[0, j] - counts[j] * 0.5 - (counts[j] > 0) * 0.25 for j in range(6)]
    torch.testing.assert_close(found[0], torch.stack(expected))
    assert torch.equal(Penalties(3, 1.0, 1.0)(torch.tensor([prompt]), scores), scores)


def test_penalties_are_used_only_where_they_change_something() -> None:
    assert not logits_processors(GenerationSettings(), 5)
    assert len(logits_processors(GenerationSettings(presence_penalty=-0.1), 5)) == 1


def top_token(server: Running, **fields: Any) -> list[str]:
    """The tokens of an answer in which every token is about as likely as the others."""
    flat = {"logit_bias": {str(token): -100 for token in range(13)}, "temperature": 0, "max_tokens": 12}
    text, _, _ = said(server, "1+2=", extra_body={"ignore_eos": True, **flat, **fields}, chat=False, stream=False)
    return list(text)


def test_a_frequency_penalty_spreads_tokens(server: Running) -> None:
    """Of the three tokens that a bias leaves, penalties keep any from being repeated for long."""
    without = Counter(top_token(server))
    penalized = Counter(top_token(server, frequency_penalty=2, presence_penalty=2))
    rewarded = Counter(top_token(server, frequency_penalty=-2, presence_penalty=-2))
    assert without.total() == penalized.total() == rewarded.total() == 12
    assert max(penalized.values()) < max(rewarded.values()) == 12
    assert penalized != without


@EVERY_WAY
def test_a_logit_bias_applies_to_both_endpoints(server: Running, chat: bool, stream: bool) -> None:
    bias = {"logit_bias": {"7": 100}}
    assert said(server, max_tokens=4, extra_body=bias, chat=chat, stream=stream) == ("4444", "length", 4)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (GenerationSettings(), {"max_new_tokens": 1024, "do_sample": False}),
        (GenerationSettings(max_tokens=5), {"max_new_tokens": 5}),
        (GenerationSettings(temperature=0.0), {"do_sample": False}),
        (GenerationSettings(temperature=0.5, top_p=0.9), {"do_sample": True, "temperature": 0.5, "top_p": 0.9}),
        (GenerationSettings(logit_bias={3: 1.0}), {"sequence_bias": {(3,): 1.0}}),
        (GenerationSettings(ignore_eos=True), {"eos_token_id": -1}),
    ],
    ids=str,
)
def test_settings_change_the_checkpoints_own(
    server: Running, settings: GenerationSettings, changes: dict[str, Any]
) -> None:
    own = server.model.generation_config
    before = own.to_dict()
    config = generation_config(own, settings)
    assert {name: getattr(config, name) for name in changes} == changes
    assert own.to_dict() == before


GREEDY = SimpleNamespace(do_sample=False, temperature=1.0, top_p=0.9)
SAMPLING = SimpleNamespace(do_sample=True, temperature=0.7, top_p=None)


@pytest.mark.parametrize(
    ("settings", "own", "field"),
    [
        (GenerationSettings(max_tokens=5, ignore_eos=True), GREEDY, None),
        (GenerationSettings(temperature=0.0, top_p=0.5), GREEDY, None),  # top_p changes nothing
        (GenerationSettings(temperature=0.7, top_p=1.0), SAMPLING, None),
        (GenerationSettings(temperature=0.5), GREEDY, "temperature"),
        (GenerationSettings(temperature=0.0), SAMPLING, "temperature"),
        (GenerationSettings(top_p=0.5), SAMPLING, "top_p"),
        (GenerationSettings(stop=("a",)), GREEDY, "stop"),
        (GenerationSettings(seed=1), GREEDY, "seed"),
        (GenerationSettings(frequency_penalty=0.1), GREEDY, "frequency_penalty"),
        (GenerationSettings(presence_penalty=0.1), GREEDY, "presence_penalty"),
        (GenerationSettings(logit_bias={1: 1.0}), GREEDY, "logit_bias"),
    ],
    ids=str,
)
def test_what_continuous_batching_would_ignore_is_refused(
    settings: GenerationSettings, own: Any, field: str | None
) -> None:
    if field is None:
        check_shared(settings, own)
    else:
        error = refused(lambda: check_shared(settings, own))
        assert error["param"] == field
        assert "continuous batching" in error["message"]
