"""Limits on the lengths and numbers of prompts and answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polymoe.serve.errors import refusal

MAX_ANSWERS = 128
"""Maximum number of answers to one request: its prompts, times ``n``."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests may ask for.

    Attributes:
        context: maximum number of tokens of prompt and answer together; None for no limit.
        max_tokens: maximum number of tokens in an answer; None if only the context limits it.
        characters: maximum number of characters in a prompt; None for no limit.
        vocabulary: number of tokens that the model knows; None if that is unknown.
    """

    context: int | None
    max_tokens: int | None = None
    characters: int | None = None
    vocabulary: int | None = None

    def check(self, name: str, tokens: int) -> None:
        """Check the length of an answer that the field ``name`` of a request asks for.

        Raises:
            HTTPException: 400, if no answer can have so many tokens.
        """
        most = min((n for n in (self.max_tokens, self.context) if n is not None), default=None)
        if most is not None and tokens > most:
            raise refusal(f"{name} is {tokens}, but an answer of this model has at most {most} tokens", param=name)

    def check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        """Check that the model knows the tokens, by id, of the field ``name``.

        Raises:
            HTTPException: 400, if it does not.
        """
        if self.vocabulary is not None and max(tokens, default=0) >= self.vocabulary:
            raise refusal(f"{name} must name tokens from 0 to {self.vocabulary - 1}", param=name)

    def check_characters(self, characters: int) -> None:
        """Check the length of a prompt before it is tokenized.

        Raises:
            HTTPException: 400, if the prompt cannot fit in the context.
        """
        if self.characters is not None and characters > self.characters:
            raise refusal(
                f"the prompt has {characters} characters, but prompt and answer share a context of {self.context} "
                f"tokens, and a prompt may have at most {self.characters} characters",
                code="context_length_exceeded",
            )

    def bound(self, prompt_tokens: int, max_tokens: int) -> int:
        """The maximum number of tokens in an answer to a prompt of so many; ``max_tokens`` are asked for.

        Raises:
            HTTPException: 400 for a prompt that is empty or leaves no room in the context.
        """
        if prompt_tokens < 1:
            raise refusal("the prompt is empty")
        if self.context is not None and prompt_tokens >= self.context:
            raise refusal(
                f"the prompt has {prompt_tokens} tokens, but prompt and answer share a context of {self.context}",
                code="context_length_exceeded",
            )
        room = None if self.context is None else self.context - prompt_tokens
        return min(n for n in (max_tokens, self.max_tokens, room) if n is not None)
