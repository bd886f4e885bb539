"""GenerationSettings: how one request's answers are generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """What a request says of its answers, checked. None stands for the checkpoint's own setting.

    Attributes:
        max_tokens: maximum number of tokens in an answer.
        min_tokens: neither the end token nor ``stop`` or ``stop_token_ids`` end an answer with fewer tokens.
        temperature: 0 takes the most probable token, more than 0 samples.
        top_k: sample from so many most probable tokens; 0 for all.
        top_p: sample from the most probable tokens that have this probability together.
        min_p: sample from the tokens that are at least this times as probable as the most probable one.
        repetition_penalty: logits of tokens that the prompt or the answer has are divided by this if they are above 0,
            and multiplied by it if not.
        frequency_penalty, presence_penalty: a token's logit falls by the first for each time that the answer has it,
            and once by the second if the answer has it.
        logit_bias: added to the logits of these tokens.
        seed: of the sampling; None for any.
        stop: strings that end an answer.
        stop_token_ids: tokens that end an answer.
        ignore_eos: let an answer continue past the end token.
        logprobs: number of alternatives to report with each token's log probability; None reports neither.
        n: number of answers to each prompt.
        stream: send answers in parts.
        include_usage: end a stream with a part of its own for the token counts.
        continuous_usage: send the token counts so far with each part of a stream, as vLLM.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
