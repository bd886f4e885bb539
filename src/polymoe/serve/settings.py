"""GenerationSettings: how one request's answer is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["GenerationSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """What a request says of its answer, checked. None stands for the checkpoint's own setting.

    Attributes:
        max_tokens: maximum number of tokens in the answer.
        temperature: 0 takes the most probable token, more than 0 samples.
        top_p: sample from the most probable tokens that have this probability together.
        frequency_penalty, presence_penalty: as OpenAI defines them; see :class:`~polymoe.serve.sampling.Penalties`.
        logit_bias: added to the logits of these tokens.
        seed: of the sampling; None for any.
        stop: strings that end the answer.
        ignore_eos: let the answer continue past the end token.
        stream: send the answer in parts.
        include_usage: end a stream with a part of its own for the token counts.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
