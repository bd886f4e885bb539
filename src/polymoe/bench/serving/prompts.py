"""Prompts of a wanted length in tokens, no two alike, counted as the server counts them.

A prompt is a row of short words, drawn at random, that are one token each in the vocabularies of today's models; for a
model with a token a character, a row of digits. How many tokens they really are, and what a server adds (a first token,
a chat template), is not assumed: texts are counted, by the server or by a tokenizer, and lengthened or cut until the
count is right. Random words start differently, so that a server's prefix cache finds none of them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from polymoe.errors import ArgumentError, MissingDependency, ServerError

__all__ = ["Count", "Prompts", "Tokenizer"]

Count = Callable[[str], Awaitable[int]]
"""Tokens of a prompt, with everything that is added to it."""

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


class Prompts:
    """Makes prompts; :meth:`calibrate` comes first.

    Args:
        count: counts a prompt's tokens.
        seed: prompts of two objects with one seed are the same.
        shared: tokens at the start that all prompts have in common, for a server's prefix cache to find.
    """

    def __init__(self, count: Count, *, seed: int, shared: int = 0) -> None:
        self._count = count
        self._random = random.Random(seed)
        self._shared = shared
        self._words: Sequence[str] = ()
        self._between = ""
        self._each = 1.0
        self._added = 0.0
        self._prefix: tuple[str, ...] = ()
        self._fitted: dict[int, tuple[int, int]] = {}

    async def calibrate(self) -> None:
        """Find words that are one token each, and how many tokens are added to them.

        Raises:
            ServerError: if the server counts no prompt.
            ArgumentError: if longer prompts do not count more.
        """
        found = []
        for words, between in ((_WORDS, " "), (_DIGITS, "")):
            try:
                once = await self._count(between.join(words))
                twice = await self._count(between.join(words + words))
            except ServerError:
                if words is _DIGITS:
                    raise
                continue  # letters may be a token each, and so many not fit into the context
            each = (twice - once) / len(words)
            if each > 0:
                found.append((each != 1, each, once - each * len(words), words, between))
            if each == 1:
                break
        if not found:
            raise ArgumentError(
                "--input-len",
                expected="a server whose count of tokens grows with the prompt",
                got="one that stays",
                hint="--tokenizer names the model's own",
            )
        _, self._each, self._added, self._words, self._between = min(found)
        self._prefix = tuple(self._random.choices(self._words, k=round(self._shared / self._each)))

    async def make(self, tokens: int, number: int) -> tuple[list[str], int]:
        """``number`` prompts of ``tokens`` tokens, or as near as whole words come, and how many they are.

        Raises:
            ArgumentError: if there is less room than for one word.
            ServerError: if the server refuses to count a prompt of that length.
        """
        if tokens not in self._fitted:
            self._fitted[tokens] = await self._fit(tokens)
        words, counted = self._fitted[tokens]
        return [self._text(words) for _ in range(number)], counted

    async def _fit(self, tokens: int) -> tuple[int, int]:
        """With how many words a prompt has so many tokens, and how many it has: a guess, set right by counting."""
        words = max(len(self._prefix) + 1, round((tokens - self._added) / self._each))
        tried: dict[int, int] = {}
        while words not in tried and len(tried) < 5:
            tried[words] = await self._count(self._text(words))
            off = tokens - tried[words]
            if off == 0:
                break
            words += round(off / self._each) or (1 if off > 0 else -1)
            words = max(len(self._prefix) + 1, words)
        best = min(tried, key=lambda n: abs(tried[n] - tokens))
        if tried[best] > tokens and best == len(self._prefix) + 1:
            raise ArgumentError(
                "--input-len", expected=f"at least {tried[best]}, the shortest prompt here", got=str(tokens)
            )
        return best, tried[best]

    def _text(self, words: int) -> str:
        rest = self._random.choices(self._words, k=words - len(self._prefix))
        return self._between.join((*self._prefix, *rest))


class Tokenizer:
    """Counts tokens as a server with this tokenizer does.

    Args:
        path: a directory or Hub id that Transformers' ``AutoTokenizer`` reads.
        chat: whether prompts are sent as chat messages, which its chat template then renders.

    Raises:
        MissingDependency: without Transformers.
        ArgumentError: if there is no tokenizer, or none with a chat template.
    """

    def __init__(self, path: str, *, chat: bool) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingDependency(
                "--tokenizer", expected="transformers", got=str(error), hint="pip install 'polymoe[transformers]'"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
            raise ArgumentError("--tokenizer", expected="one Transformers reads", got=f"{path}: {error}") from error
        if chat and getattr(self._tokenizer, "chat_template", None) is None:
            raise ArgumentError("--tokenizer", expected="one with a chat template, for --chat", got=f"{path}: none")
        self._chat = chat

    def count_prompt(self, text: str) -> int:
        """Tokens of a prompt, with those that the template or the tokenizer adds."""
        if not self._chat:
            return len(self._tokenizer(text, verbose=False)["input_ids"])
        message = {"role": "user", "content": text}
        return self.count_text(
            self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        )

    def count_text(self, text: str) -> int:
        """Tokens of a text alone, such as an answer's."""
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
