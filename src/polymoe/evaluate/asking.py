"""Send questions to a server: many requests at once through OpenAI's client, which retries with increasing waits.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from polymoe.errors import MissingDependency, ServerError, nearest
from polymoe.evaluate.questions import Question, Task
from polymoe.evaluate.records import AnswerRecord, Settings

try:
    import openai
except ImportError as error:
    raise MissingDependency("polymoe eval", got=str(error), hint="pip install 'polymoe[eval]'") from error

__all__ = ["Server", "ask_all"]

FAILURES_IN_A_ROW = 10
"""A run ends after this many consecutive failed requests, including retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server to ask, and the limits of requests.

    Attributes:
        url: the server's address; without a path, ``/v1`` is added.
        api_key: the bearer token.
        concurrency: number of simultaneous requests.
        timeout_s: longest duration of a request, in seconds.
        retries: how often a request is repeated after 408, 409, 429, 5xx, a timeout or a broken connection.
    """

    url: str
    api_key: str = field(default="none", repr=False)
    concurrency: int = 16
    timeout_s: float = 1800.0
    retries: int = 8

    @property
    def base_url(self) -> str:
        """The address to which paths such as ``/chat/completions`` are added."""
        return self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")

    def options(self) -> dict[str, Any]:
        """Return arguments for OpenAI's clients."""
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "timeout": openai.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s)),
            "max_retries": self.retries,
        }

    def model(self, name: str | None) -> str:
        """Return the model to ask: ``name``, if the server has it; without a name, its only model.

        Raises:
            ServerError: if the server cannot be reached, refuses the key, lacks the model, or has several without a
                name.
        """
        try:
            with openai.OpenAI(**{**self.options(), "timeout": 30, "max_retries": 2}) as client:
                names = [model.id for model in client.models.list()]
        except (openai.NotFoundError, AttributeError, TypeError) as error:  # the server does not list its models
            if name is not None and isinstance(error, openai.NotFoundError):
                return name
            raise ServerError(
                self.base_url, expected="a list of models at /models", got=str(error), hint="is this the server's URL?"
            ) from error
        except openai.OpenAIError as error:
            raise _server_error(self, error) from error
        if name is None and len(names) == 1:
            return names[0]
        if name not in names:
            raise ServerError(
                self.base_url,
                expected="one of its models" if name else "--model, because the server has several",
                got=repr(name) if name else "none",
                hint=nearest(name or "", names),
            )
        return name


@dataclass(slots=True)
class _Progress:
    pending: deque[tuple[int, Question]]
    workers: int  # workers that still take questions
    failures: list[str] = field(default_factory=list)
    in_a_row: int = 0


async def ask_all(
    server: Server,
    settings: Settings,
    task: Task,
    pending: Iterable[tuple[int, Question]],
    on_record: Callable[[AnswerRecord], None],
) -> list[str]:
    """Ask every (repeat, question) of ``pending`` in order; returns a message for each failure.

    ``on_record`` is called with every answer when it arrives. A prompt longer than the model's context counts as an
    invalid answer, unless ``max_tokens`` may be the cause. A server that keeps answering 429 gets fewer requests at
    once.

    Raises:
        ServerError: if the server refuses key or model, or if ten requests in a row fail.
    """
    queue = deque(pending)
    progress = _Progress(queue, workers=min(server.concurrency, len(queue)))
    async with openai.AsyncOpenAI(**server.options()) as client:

        async def work() -> None:
            while progress.pending:
                repeat, question = progress.pending.popleft()
                try:
                    record = await _ask(client, settings, task, question, repeat)
                except openai.RateLimitError as error:
                    if progress.workers > 1:
                        progress.workers -= 1
                        progress.pending.appendleft((repeat, question))
                        return
                    _failed(server, progress, question, error)
                except openai.OpenAIError as error:
                    _failed(server, progress, question, error)
                else:
                    progress.in_a_row = 0
                    on_record(record)
            progress.workers -= 1

        tasks = [asyncio.create_task(work()) for _ in range(progress.workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for running in tasks:
                running.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return progress.failures


def _failed(server: Server, progress: _Progress, question: Question, error: openai.OpenAIError) -> None:
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError | openai.NotFoundError):
        raise _server_error(server, error) from error
    progress.failures.append(f"question {question.id}: {error}")
    progress.in_a_row += 1
    if progress.in_a_row >= FAILURES_IN_A_ROW:
        raise _server_error(server, error, f"{progress.in_a_row} failures in a row, the last: ") from error


async def _ask(client: Any, settings: Settings, task: Task, question: Question, repeat: int) -> AnswerRecord:
    prompt, expected = task.ask(question, seed=settings.seed or 0, repeat=repeat)
    arguments: dict[str, Any] = {"model": settings.model, "extra_body": json.loads(settings.extra)}
    for name in ("temperature", "top_p", "max_tokens"):
        if (value := getattr(settings, name)) is not None:
            arguments[name] = value
    if settings.seed is not None:
        digest = hashlib.sha256(f"{settings.seed}/{repeat}/{question.id}".encode()).digest()
        arguments["seed"] = int.from_bytes(digest[:4], "big") >> 1
    if settings.endpoint == "chat":
        create = client.chat.completions.with_raw_response.create
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        arguments["messages"] = [*system, {"role": "user", "content": prompt}]
    else:
        create = client.completions.with_raw_response.create
        arguments["prompt"] = prompt
    start = time.monotonic()
    text, finish_reason, usage, retries = "", "refused", None, 0
    try:
        raw = await create(**arguments)
        latency_us, retries = round(raw.elapsed.total_seconds() * 1e6), raw.retries_taken
        text, finish_reason, usage = _read(raw.parse(), chat=settings.endpoint == "chat")
    except openai.BadRequestError as error:
        # With max_tokens, servers send the same error for a prompt that leaves too little room: a wrong setting.
        too_long = error.code == "context_length_exceeded" or "context length" in error.message
        if not too_long or settings.max_tokens is not None:
            raise
        latency_us = round((time.monotonic() - start) * 1e6)
    answer = task.extract(text, finished=finish_reason != "length")
    return AnswerRecord(
        id=question.id,
        repeat=repeat,
        expected=expected,
        answer=answer,
        correct=answer == expected,
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=getattr(usage, "prompt_tokens", None),
        completion_tokens=getattr(usage, "completion_tokens", None),
        latency_us=latency_us,
        ended_us=time.time_ns() // 1000,
        retries=retries,
    )


def _read(response: Any, *, chat: bool) -> tuple[str, str | None, Any]:
    """Return text, finish reason and usage of a response, which OpenAI's client does not validate."""
    try:
        choice = response.choices[0]
        text = choice.message.content if chat else choice.text
        return text or "", choice.finish_reason, response.usage
    except (AttributeError, IndexError, TypeError) as error:
        raise openai.OpenAIError(f"no answer in the response: {str(response)[:200]}") from error


def _server_error(server: Server, error: openai.OpenAIError, before: str = "") -> ServerError:
    cause = error.__cause__
    reason = f"{error} {cause}" if isinstance(error, openai.APIConnectionError) and cause else str(error)
    hint = "--api-key, or POLYMOE_API_KEY" if isinstance(error, openai.AuthenticationError) else None
    return ServerError(server.base_url, expected="answers", got=before + reason, hint=hint)
