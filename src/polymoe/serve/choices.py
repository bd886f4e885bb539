"""AnswerChoice: one answer on its way from tokens to a client, in parts that end at a stop string.

Transformers' response parser tells reasoning and tool calls from the answer
(:mod:`polymoe.engines.transformers.replies`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastapi import HTTPException

from polymoe.engines.transformers.replies import ReplyPart, ReplyReader
from polymoe.serve.sampling import TokenSampler

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer with its log probability.

    Attributes:
        id: of the token.
        logprob: natural logarithm of its probability by the model, before anything that a request changes.
        top: ids and log probabilities of the most probable tokens at its place.
        offset: characters of the answer before it.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ChoicePart:
    """A part of an answer.

    Attributes:
        index: number of the answer among those to its request.
        parts: further text, reasoning and tool calls.
        logprobs: of further tokens.
        finish: why the answer ended; None if more follows.
        error: why there will be no more of it.
    """

    index: int
    parts: tuple[ReplyPart, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    error: HTTPException | None = None


class StopStrings:
    """Text up to the first stop string, which may arrive in pieces: what may be the start of one is held back.
    ``found`` is whether one was there."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self.found = stop, "", False

    def feed(self, text: str) -> str:
        """Further text that comes before any stop string."""
        if self.found or not self._stop:
            return "" if self.found else text
        text = self._held + text
        at = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        self.found = at is not None
        self._held = "" if self.found else self._possible_start(text)
        return text[:at] if self.found else text[: len(text) - len(self._held)]

    def rest(self) -> str:
        """The text that was held back."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> str:
        """The longest suffix of the text that is a prefix of a stop string."""
        suffixes = (text[-n:] for n in range(min(len(text), max(map(len, self._stop)) - 1), 0, -1))
        return next((suffix for suffix in suffixes if any(stop.startswith(suffix) for stop in self._stop)), "")


@dataclass(slots=True, eq=False)
class AnswerChoice:
    """One answer. :meth:`feed` and :meth:`fail` are called in the event loop.

    Attributes:
        index: number of the answer among those to its request.
        prompt: token ids of its prompt.
        ends: tokens that end it.
        max_tokens: maximum number of its tokens.
        sampler: chooses its tokens.
        reader: finds reasoning and tool calls in them.
        out: where its parts go.
        on_token: called for each of its tokens.
        on_end: called once, when it has ended.
        counts_prompt: whether it is the first answer to its prompt.
        tokens: how many it has.
        ended: whether it has all of them.
    """

    index: int
    prompt: list[int]
    ends: tuple[int, ...]
    max_tokens: int
    sampler: TokenSampler
    reader: ReplyReader
    out: asyncio.Queue[ChoicePart]
    on_token: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None
    counts_prompt: bool = True
    tokens: int = 0
    ended: bool = False
    _stop: StopStrings = field(init=False)
    _calls: bool = False
    _characters: int = 0

    def __post_init__(self) -> None:
        self._stop = StopStrings(self.sampler.settings.stop)

    def feed(self, token: int) -> None:
        """Take the next token; after the last one, do nothing."""
        if self.ended:
            return
        settings = self.sampler.settings
        logprobs = self._logprob(token)
        self.tokens += 1
        self.on_token()
        at_end = token in self.ends
        parts = self._before_stop([] if token in settings.stop_token_ids else self.reader.feed([token]))
        finish: Finish | None = None
        if at_end or self._stop.found:
            finish = "stop"
        elif self.tokens >= self.max_tokens:
            finish = "length"
        if finish is not None:
            self._finish(finish, parts, logprobs)
        elif parts or logprobs:
            self.out.put_nowait(ChoicePart(self.index, tuple(parts), logprobs))

    def fail(self, error: HTTPException) -> None:
        """No further token comes, because of an error."""
        if not self.ended:
            self.ended = True
            self.out.put_nowait(ChoicePart(self.index, error=error))
            self.on_end()

    def _finish(self, finish: Finish, parts: list[ReplyPart], logprobs: tuple[TokenLogprob, ...]) -> None:
        self.ended = True
        if not self._stop.found:
            parts = [*parts, *self._before_stop(self.reader.finish())]
            if held := self._stop.rest():
                parts.append(ReplyPart("content", held))
        calls = self._calls and finish == "stop"
        self.out.put_nowait(ChoicePart(self.index, tuple(parts), logprobs, "tool_calls" if calls else finish))
        self.on_end()

    def _before_stop(self, parts: list[ReplyPart]) -> list[ReplyPart]:
        """The parts up to a stop string in the text of the answer, if it is long enough for one to end it."""
        found: list[ReplyPart] = []
        long_enough = self.tokens >= self.sampler.settings.min_tokens
        for part in parts:
            if part.kind == "content":
                self._characters += len(part.text)
                if text := self._stop.feed(part.text) if long_enough else part.text:
                    found.append(ReplyPart("content", text))
            elif not self._stop.found:
                if held := self._stop.rest():
                    found.append(ReplyPart("content", held))
                self._calls |= part.kind == "tool_call"
                found.append(part)
        return found

    def _logprob(self, token: int) -> tuple[TokenLogprob, ...]:
        alternatives = self.sampler.settings.logprobs
        if alternatives is None:
            return ()
        step, row = self.sampler.logprobs[self.tokens]
        (_, logprob), *top = step.row(row, alternatives)
        return (TokenLogprob(token, logprob, tuple(top), self._characters),)
