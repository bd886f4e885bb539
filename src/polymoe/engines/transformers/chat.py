"""Chat: a conversation with a model in this process, one streamed reply at a time, for ``polymoe chat``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from polymoe.engines.transformers.chat_template import ChatTemplateError
from polymoe.engines.transformers.generator import Generator
from polymoe.engines.transformers.replies import ParsedReply, ReplyPart, ReplyReader
from polymoe.errors import ArgumentError, CheckpointError

_DEFAULT_MAX_TOKENS = 4096  # of models without a known context


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply, and how it ended.

    Attributes:
        reply: the model's.
        tokens: how many were generated.
        ended: "stop" where the model ended it, "length" at the limit, "interrupted" by :meth:`Chat.stop`.
        kept: whether message and reply are in the history. Those of an interrupted reply without an answer are not.
    """

    reply: ParsedReply
    tokens: int
    ended: str
    kept: bool


class Chat:
    """A conversation. The history has the answers, without reasoning, as chat templates expect it.

    Args:
        generator: the model.
        system: a system message.
        max_tokens: maximum number of tokens in a reply; None is what fits in the context.
        temperature: 0 takes the most probable token; None is the checkpoint's own choice.

    Attributes:
        messages: the history, as a chat template reads it.

    Raises:
        CheckpointError: for a model without a chat template.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        if getattr(generator.tokenizer, "chat_template", None) is None:
            raise CheckpointError(
                generator.model.name_or_path,
                expected="a chat template",
                got="none: a base model continues text",
                hint="polymoe run --raw continues a prompt",
            )
        self.generator, self.max_tokens = generator, max_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._sampling: dict[str, Any] = {}
        if temperature is not None:
            self._sampling = {"do_sample": temperature > 0, "temperature": temperature or 1.0}
        self._stopping = threading.Event()
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def stop(self) -> None:
        """End the running reply at its next token. May be called from a signal handler or another thread."""
        self._stopping.set()

    def ask(self, message: str, on_part: Callable[[ReplyPart], None]) -> Turn:
        """Send a message and stream the reply.

        Args:
            message: the user's.
            on_part: called with each part of the reply as soon as it is generated.

        Raises:
            ArgumentError: if no room is left in the context; the history is unchanged.
            CheckpointError: if the chat template refuses the messages; the history is unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        generator = self.generator
        try:
            prompt = generator.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except ChatTemplateError as error:
            error.hint = "the template may not take a system message, or so many messages"
            raise
        try:
            inputs = generator.encode([prompt], chat=True)
        except ArgumentError as error:
            error.where, error.hint = "chat", "start over with a shorter conversation"
            raise
        prompt_ids = inputs["input_ids"][0].tolist()
        stream = _Stream(ReplyReader(generator.model, generator.tokenizer, prompt_ids), on_part)
        self._stopping.clear()
        limit = self._limit(len(prompt_ids))
        criteria = StoppingCriteriaList([_Stopped(self._stopping)])
        ended = "length"
        try:
            [ids] = generator.generate(
                inputs, max_tokens=limit, streamer=stream, stopping_criteria=criteria, **self._sampling
            )
            if len(ids) < limit or ids[-1] in self._ends():
                ended = "stop"
        except KeyboardInterrupt:  # where no handler calls stop()
            self._stopping.set()
        stream.flush()
        reply = ParsedReply.of_parts(stream.parts)
        if self._stopping.is_set():
            ended = "interrupted"
        kept = bool(reply.content) or ended != "interrupted"
        if kept:
            self.messages = [*messages, {"role": "assistant", "content": reply.content}]
        return Turn(reply, stream.tokens, ended, kept)

    def _ends(self) -> set[int]:
        ends = self.generator.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}

    def _limit(self, prompt_tokens: int) -> int:
        context = self.generator.context
        room = _DEFAULT_MAX_TOKENS if context is None else context - prompt_tokens
        return room if self.max_tokens is None else min(self.max_tokens, room)


class _Stream:
    """A streamer of Transformers: gets the prompt, then each token."""

    def __init__(self, reader: ReplyReader, on_part: Callable[[ReplyPart], None]) -> None:
        self._reader, self._on_part = reader, on_part
        self._prompt = True
        self.parts: list[ReplyPart] = []
        self.tokens = 0

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        ids = value.flatten().tolist()
        self.tokens += len(ids)
        self._add(self._reader.feed(ids))

    def end(self) -> None:
        pass  # not called after an exception

    def flush(self) -> None:
        """Hand on what the reader holds back."""
        self._add(self._reader.finish())

    def _add(self, parts: list[ReplyPart]) -> None:
        self.parts += parts
        for part in parts:
            self._on_part(part)


class _Stopped(StoppingCriteria):
    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._stopping.is_set(), dtype=torch.bool, device=input_ids.device)
