"""From a request's settings to Transformers' generation: its config, and what changes the logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from polymoe.serve.errors import refusal
from polymoe.serve.settings import GenerationSettings

__all__ = ["Penalties", "check_shared", "generation_config", "logits_processors"]

_DEFAULT_MAX_TOKENS = 1024


def generation_config(model_config: Any, settings: GenerationSettings, *, shared: bool = False) -> Any:
    """Transformers' config of one generation.

    Args:
        model_config: the checkpoint's own, which is not changed.
        settings: of the request.
        shared: whether the request shares forward passes with others, by continuous batching.
    """
    config = copy.deepcopy(model_config)
    config.max_new_tokens = settings.max_tokens or max(config.max_new_tokens or 0, _DEFAULT_MAX_TOKENS)
    if settings.temperature is not None:
        config.do_sample = settings.temperature > 0
        config.temperature = settings.temperature or 1.0
    if settings.top_p is not None:
        config.top_p = settings.top_p
    if settings.logit_bias:
        config.sequence_bias = {(token,): bias for token, bias in settings.logit_bias.items()}
    if settings.ignore_eos:
        config.eos_token_id = -1  # no token; Transformers would replace None by the model's default
    if shared:
        config.use_cache = False  # continuous batching has a cache of its own
    return config


def check_shared(settings: GenerationSettings, model_config: Any) -> None:
    """Check that a request can share forward passes: Transformers has one set of sampling settings for all.

    Args:
        settings: of the request.
        model_config: the generation config of all requests.

    Raises:
        HTTPException: 400, naming the first field that says something else.
    """
    plain = GenerationSettings()
    for name in ("stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias"):
        if getattr(settings, name) != getattr(plain, name):
            raise refusal(f"{name} must be omitted: continuous batching does not support it", param=name)
    for name, own in (
        ("temperature", (model_config.temperature or 1.0) if model_config.do_sample else 0.0),
        ("top_p", (model_config.top_p or 1.0) if model_config.do_sample else None),
    ):
        value = getattr(settings, name)
        if None not in (value, own) and value != own:
            message = f"{name} must be {own:g} or omitted: continuous batching has one for all requests"
            raise refusal(message, param=name)


def logits_processors(settings: GenerationSettings, prompt_tokens: int) -> LogitsProcessorList:
    """What changes the logits of a generation, in addition to Transformers' own.

    Args:
        settings: of the request.
        prompt_tokens: length of the prompt.
    """
    found = LogitsProcessorList()
    if settings.frequency_penalty or settings.presence_penalty:
        found.append(Penalties(prompt_tokens, settings.frequency_penalty, settings.presence_penalty))
    return found


class Penalties(LogitsProcessor):
    """OpenAI's penalties: a token's logit falls by ``frequency`` for each time that the answer has it, and once by
    ``presence`` if the answer has it. The prompt does not count.

    Definition: https://platform.openai.com/docs/advanced-usage (frequency and presence penalties)

    Args:
        prompt_tokens: length of the prompt, with which the token ids begin.
        frequency, presence: the penalties; those below 0 make repetition more likely.
    """

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self._prompt_tokens, self._frequency, self._presence = prompt_tokens, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        answer = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
