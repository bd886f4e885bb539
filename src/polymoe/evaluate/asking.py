"""Send questions to a server, many at once, and record the answers."""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from polymoe.common.json_input import parse_json
from polymoe.common.openai_client import (
    Completion,
    Reply,
    Server,
    ServerConnection,
    all_results,
    one_line,
    read_completion,
    token_count,
)
from polymoe.errors import ServerError
from polymoe.evaluate.questions import Question
from polymoe.evaluate.records import AnswerRecord, Settings

__all__ = ["answer_of", "ask_all"]

FAILURES_IN_A_ROW = 10
"""A run ends after this many consecutive failed requests, including retries."""


@dataclass(slots=True)
class _Progress:
    pending: deque[tuple[int, Question]]
    workers: int  # workers that still take questions
    failures: list[str] = field(default_factory=list)
    in_a_row: int = 0


async def ask_all(
    server: Server,
    settings: Settings,
    pending: Iterable[tuple[int, Question]],
    on_record: Callable[[AnswerRecord], None],
) -> list[str]:
    """Ask every (repeat, question) of ``pending`` in order; returns a message for each failure.

    ``on_record`` is called with every answer when it arrives. A reply that is not a response of the API (redirects,
    bodies that are too large or never end, other JSON, negative counts) counts as an invalid answer. So does a prompt
    longer than the model's context, unless ``max_tokens`` may be the cause. A server that keeps answering 429 gets
    fewer requests at once.

    Raises:
        ServerError: if the server refuses key or model, or if ten requests in a row fail.
    """
    queue = deque(pending)
    progress = _Progress(queue, workers=min(server.concurrency, len(queue)))
    async with ServerConnection(server) as session:

        async def work() -> None:
            while progress.pending:
                repeat, question = progress.pending.popleft()
                try:
                    reply = await session.request("POST", *_request(settings, question, repeat))
                except ServerError as error:
                    _failed(progress, question, error)
                    continue
                record = _record(settings, question, repeat, reply)
                if record is not None:
                    progress.in_a_row = 0
                    on_record(record)
                elif reply.status == 429 and progress.workers > 1:
                    progress.workers -= 1
                    progress.pending.appendleft((repeat, question))
                    return
                elif reply.status in (401, 403, 404):
                    raise server.refused(reply)
                else:
                    _failed(progress, question, server.refused(reply))
            progress.workers -= 1

        await all_results([work() for _ in range(progress.workers)])
    return progress.failures


def _failed(progress: _Progress, question: Question, error: ServerError) -> None:
    progress.failures.append(f"question {question.id}: {error.got}")
    progress.in_a_row += 1
    if progress.in_a_row >= FAILURES_IN_A_ROW:
        got = f"{progress.in_a_row} failures in a row, the last: {error.got}"
        raise ServerError(error.where, expected=error.expected, got=got, hint=error.hint) from error


def _request(settings: Settings, question: Question, repeat: int) -> tuple[str, dict[str, Any]]:
    """Return path and body."""
    body: dict[str, Any] = {"model": settings.model}
    for name in ("temperature", "top_p", "max_tokens"):
        if (value := getattr(settings, name)) is not None:
            body[name] = value
    if settings.seed is not None:
        digest = hashlib.sha256(f"{settings.seed}/{repeat}/{question.id}".encode()).digest()
        body["seed"] = int.from_bytes(digest[:4], "big") >> 1
    if settings.endpoint == "chat":
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        body["messages"] = [*system, {"role": "user", "content": question.text}]
    else:
        body["prompt"] = question.text
    path = "/chat/completions" if settings.endpoint == "chat" else "/completions"
    return path, {**body, **json.loads(settings.extra)}


def _record(settings: Settings, question: Question, repeat: int, reply: Reply) -> AnswerRecord | None:
    """Return the answer in a reply; None for a reply that refuses the request."""
    malformed = None
    if 200 <= reply.status < 400:
        try:
            if reply.status != 200:
                raise ValueError(reply.reason())
            completion = read_completion(reply.whole())
            if completion.error is not None:
                return None  # a refusal with the wrong status
            if not completion.answers:
                raise ValueError(f"no answer in the response: {one_line(reply.body[:80].decode(errors='replace'))}")
            counts = {name: token_count(completion.usage, name) for name in ("prompt_tokens", "completion_tokens")}
        except ValueError as error:
            completion, counts, malformed = Completion(), {}, str(error)
    elif _too_long(reply) and settings.max_tokens is None:
        completion, counts = Completion(finish_reason="refused"), {}
    else:
        return None
    answer = None if malformed else answer_of(completion.text)
    return AnswerRecord(
        id=question.id,
        repeat=repeat,
        expected=question.answer,
        answer=answer,
        correct=answer == question.answer,
        text=completion.text,
        finish_reason=completion.finish_reason,
        prompt_tokens=counts.get("prompt_tokens"),
        completion_tokens=counts.get("completion_tokens"),
        latency_us=reply.latency_us,
        ended_us=time.time_ns() // 1000,
        retries=reply.retries,
        malformed=malformed,
    )


def answer_of(text: str) -> str | None:
    """Return the answer in a response: its text without surrounding white space, after ``<think>...</think>`` if a
    server leaves that in; None if there is none, or the reasoning never ends."""
    _, end, after = text.rpartition("</think>")
    if not end and after.lstrip().startswith("<think>"):
        return None
    return after.strip() or None


def _too_long(reply: Reply) -> bool:
    """Whether the prompt is longer than the context. With ``max_tokens``, servers send the same error for a prompt that
    leaves too little room, which is a wrong setting."""
    if reply.status != 400:
        return False
    try:
        code = parse_json(reply.body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = None
    return code == "context_length_exceeded" or "context length" in reply.reason()
