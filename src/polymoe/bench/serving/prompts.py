"""Random prompts of a given length in tokens, as counted by the server.

A prompt is a sequence of random short words that are one token each in today's vocabularies, or of digits for a model
with one token per character. Neither the number of tokens nor what a server adds (a first token, a chat template) is
assumed: the server counts each text, which is lengthened or shortened until the count is right. Prompts
start with different words, so that a server's prefix cache finds none of them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from polymoe.errors import ArgumentError, ServerError

Count = Callable[[str], Awaitable[int]]
"""Counts the tokens of a prompt with everything that is added to it."""

_COMMON = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who its now find long down day did get come made may part over new sound "
    "take only little work know place year live me back give most very after thing our just name good man think say "
    "great where help through much before line right too means old any same tell boy follow came want show also "
    "around form three small set put end does another well large must big even such because turn here why ask went "
    "men read need land different home us move try kind hand picture again change off play air away animal house "
    "point page letter mother answer found study still learn should world"
)
_WORDS = tuple(_COMMON.split())
_DIGITS = tuple("0123456789")
_FEWEST_TOKENS_A_WORD, _MOST_TOKENS_A_WORD = 1 / 4, 64
"""Counts of tokens outside of these bounds are wrong, and would make prompts of any size."""


class Prompts:
    """Makes prompts, the same ones from the same seed; call :meth:`calibrate` first."""

    def __init__(self, count: Count, *, seed: int) -> None:
        self._count = count
        self._random = random.Random(seed)
        self._words: Sequence[str] = ()
        self._between = ""
        self._each = 1.0
        self._added = 0.0
        self._fitted: dict[int, int] = {}

    async def calibrate(self) -> None:
        """Find words of one token each, and the number of added tokens.

        Raises:
            ServerError: if the server does not count prompts.
            ArgumentError: if longer prompts do not have more tokens.
        """
        found = []
        for words, between in ((_WORDS, " "), (_DIGITS, "")):
            try:
                once = await self._count(between.join(words))
                twice = await self._count(between.join(words + words))
            except ServerError:
                if words is _DIGITS:
                    raise
                continue  # letters may be one token each, and the text too long for the context
            each = (twice - once) / len(words)
            if _FEWEST_TOKENS_A_WORD <= each <= _MOST_TOKENS_A_WORD:
                found.append((each != 1, each, once - each * len(words), words, between))
            if each == 1:
                break
        if not found:
            raise ArgumentError(
                "input_len",
                expected="a server whose count of tokens grows with the prompt",
                got=f"{once} tokens, and {twice} for twice the text",
            )
        _, self._each, self._added, self._words, self._between = min(found)

    async def make(self, tokens: int, number: int) -> list[str]:
        """Make ``number`` prompts of ``tokens`` tokens, or as close as whole words get.

        Raises:
            ArgumentError: if ``tokens`` is less than one word needs.
            ServerError: if the server refuses to count a prompt of that length.
        """
        if tokens not in self._fitted:
            self._fitted[tokens] = await self._fit(tokens)
        return [self._text(self._fitted[tokens]) for _ in range(number)]

    async def _fit(self, tokens: int) -> int:
        """Return the number of words for ``tokens`` tokens: a guess, corrected by counting."""
        words = max(1, round((tokens - self._added) / self._each))
        tried: dict[int, int] = {}
        while words not in tried and len(tried) < 5:
            tried[words] = await self._count(self._text(words))
            off = tokens - tried[words]
            if off == 0:
                break
            words += round(off / self._each) or (1 if off > 0 else -1)
            words = max(1, words)
        best = min(tried, key=lambda n: abs(tried[n] - tokens))
        if tried[best] > tokens and best == 1:
            raise ArgumentError(
                "input_len", expected=f"at least {tried[best]}, the shortest prompt here", got=str(tokens)
            )
        return best

    def _text(self, words: int) -> str:
        return self._between.join(self._random.choices(self._words, k=words))
