"""Answers as OpenAI's API has them: whole, or in server-sent events.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from polymoe.engines.transformers.replies import ReplyPart
from polymoe.serve.choices import AnswerChoice, ChoicePart, TokenLogprob


class Writer:
    """Writes the answers to one request, whose id they have."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request_id: str, model: str, tokenizer: Any) -> None:
        self._tokenizer, self._calls = tokenizer, dict[int, int]()
        self._same = {"id": request_id, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[AnswerChoice], parts: Sequence[ChoicePart]) -> dict[str, Any]:
        """All answers, from all their parts."""
        found = []
        for choice in choices:
            own = [part for part in parts if part.index == choice.index]
            all_parts = [part for each in own for part in each.parts]
            logprobs = [logprob for each in own for logprob in each.logprobs]
            body = self._whole_body(choice.index, all_parts)
            found.append(self._choice(choice.index, body, self._logprobs(choice, logprobs), own[-1].finish))
        return {**self._same, "object": self.whole_object, "choices": found, "usage": usage(choices)}

    def begin(self, choice: AnswerChoice) -> str:
        """The event with which an answer begins; empty if there is none."""
        return ""

    def event(self, choice: AnswerChoice, part: ChoicePart, counts: dict[str, int] | None = None) -> str:
        """The event for a part of an answer; with the token counts, if it is the last one."""
        body = self._part_body(part)
        return self._event([self._choice(part.index, body, self._logprobs(choice, part.logprobs), part.finish)], counts)

    def usage_event(self, counts: dict[str, int]) -> str:
        """The event for nothing but the token counts."""
        return self._event([], counts)

    def _event(self, choices: list[dict[str, Any]], counts: dict[str, int] | None) -> str:
        chunk = {**self._same, "object": self.chunk_object, "choices": choices}
        return _sse(chunk if counts is None else {**chunk, "usage": counts})

    def _choice(self, index: int, body: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}

    def _whole_body(self, index: int, parts: Sequence[ReplyPart]) -> dict[str, Any]:
        raise NotImplementedError

    def _part_body(self, part: ChoicePart) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, choice: AnswerChoice, logprobs: Sequence[TokenLogprob]) -> Any:
        raise NotImplementedError

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])


def _joined(parts: Sequence[ReplyPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


class ChatWriter(Writer):
    """Answers of ``/v1/chat/completions``."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def begin(self, choice: AnswerChoice) -> str:
        """The role."""
        return self._event(
            [self._choice(choice.index, {"delta": {"role": "assistant", "content": ""}}, None, None)], None
        )

    def _whole_body(self, index: int, parts: Sequence[ReplyPart]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _joined(parts, "content")}
        return {"message": message | self._more(index, parts)}

    def _part_body(self, part: ChoicePart) -> dict[str, Any]:
        text = _joined(part.parts, "content")
        return {"delta": ({"content": text} if text else {}) | self._more(part.index, part.parts)}

    def _more(self, index: int, parts: Sequence[ReplyPart]) -> dict[str, Any]:
        """Reasoning and tool calls, where there are any."""
        more: dict[str, Any] = {}
        if reasoning := _joined(parts, "reasoning"):
            more["reasoning_content"] = reasoning
        for part in parts:
            if part.kind == "tool_call":
                number = self._calls.get(index, 0)
                self._calls[index] = number + 1
                function = {"name": part.name, "arguments": part.arguments}
                call = {"index": number, "id": f"{self._same['id']}_{index}_tool_call_{number}", "type": "function"}
                more.setdefault("tool_calls", []).append({**call, "function": function})
        return more

    def _logprobs(self, choice: AnswerChoice, logprobs: Sequence[TokenLogprob]) -> Any:
        if choice.sampler.settings.logprobs is None:
            return None
        return {
            "content": [
                {**self._token(x.id, x.logprob), "top_logprobs": [self._token(*t) for t in x.top]} for x in logprobs
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionWriter(Writer):
    """Answers of ``/v1/completions``."""

    whole_object = chunk_object = "text_completion"

    def _whole_body(self, index: int, parts: Sequence[ReplyPart]) -> dict[str, Any]:
        return {"text": _joined(parts, "content")}

    def _part_body(self, part: ChoicePart) -> dict[str, Any]:
        return {"text": _joined(part.parts, "content")}

    def _logprobs(self, choice: AnswerChoice, logprobs: Sequence[TokenLogprob]) -> Any:
        if choice.sampler.settings.logprobs is None:
            return None
        return {
            "tokens": [self._text(x.id) for x in logprobs],
            "token_logprobs": [x.logprob for x in logprobs],
            "top_logprobs": [{self._text(token): value for token, value in x.top} for x in logprobs],
            "text_offset": [x.offset for x in logprobs],
        }


def usage(choices: Sequence[AnswerChoice]) -> dict[str, int]:
    """Numbers of tokens; a prompt counts once, however many answers it has."""
    prompt = sum(len(choice.prompt) for choice in choices if choice.counts_prompt)
    completion = sum(choice.tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def whole_answers(
    choices: Sequence[AnswerChoice], out: asyncio.Queue[ChoicePart], writer: Writer
) -> dict[str, Any]:
    """The response to a request that does not ask for a stream.

    Raises:
        HTTPException: if an answer fails.
    """
    parts, unfinished = [], len(choices)
    while unfinished:
        part = await out.get()
        if part.error is not None:
            raise part.error
        parts.append(part)
        unfinished -= part.finish is not None
    return writer.whole(choices, parts)


async def stream_answers(
    choices: Sequence[AnswerChoice],
    out: asyncio.Queue[ChoicePart],
    writer: Writer,
    *,
    include_usage: bool,
    continuous: bool = False,
) -> AsyncIterator[str]:
    """Server-sent events of the answers, of several at once in the order in which they are generated.

    Args:
        choices: the answers.
        out: where their parts arrive.
        writer: writes them.
        include_usage: the token counts are an event of their own, as in OpenAI's API; otherwise the last part has them.
        continuous: every part has the counts so far.
    """
    yield "".join(map(writer.begin, choices))
    unfinished = len(choices)
    while unfinished:
        parts = [await out.get()]
        while not out.empty():
            parts.append(out.get_nowait())
        events = []
        for part in parts:
            if part.error is not None:
                events.append(_sse(part.error.detail))
                unfinished = 0
                break
            unfinished -= part.finish is not None
            counts = usage(choices)
            with_part = continuous or (not unfinished and not include_usage)
            events.append(writer.event(choices[part.index], part, counts if with_part else None))
            if not unfinished and include_usage:
                events.append(writer.usage_event(counts))
        yield "".join(events)
    yield "data: [DONE]\n\n"


def _sse(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
