"""ModelServer: the application of an OpenAI-compatible server for one loaded model.

Each request is checked, and its prompts are read beside the event loop. Then its answers are generated, and written as
they come. No request can replace the model or unload it.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import uuid
from typing import Any, ClassVar

from fastapi import HTTPException, Request, Response, Security
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline

from polymoe.engines.transformers.model_config import context_length
from polymoe.engines.transformers.replies import ReplyReader
from polymoe.serve.answers import ChatWriter, CompletionWriter, Writer, stream_answers, whole_answers
from polymoe.serve.choices import AnswerChoice, ChoicePart
from polymoe.serve.continuous_batching import choose_generation
from polymoe.serve.errors import answer_errors, failed, refusal
from polymoe.serve.in_flight import Threads, current, in_thread
from polymoe.serve.limits import MAX_ANSWERS, Limits
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.prompts import PromptReader, longest_token
from polymoe.serve.requests import ChatRequest, CompletionRequest, read_request, settings_of
from polymoe.serve.sampling import TokenSampler, end_tokens, with_defaults
from polymoe.serve.settings import GenerationSettings
from polymoe.serve.strict_json import parse_object

log = logging.getLogger("polymoe")

LARGE_BYTES = 64 * 1024
"""Requests above this size are prepared in a thread of their own, so that the others do not wait for them."""
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class ModelServer:
    """The application for one model, its metrics, and the ways to end it.

    Args:
        model, tokenizer: as :func:`polymoe.engines.transformers.load` returns them.
        name: the model's name in requests and answers.
        max_tokens, continuous_batching, graphs, cache_memory, temperature: as in
            :class:`~polymoe.serve.lifecycle.ServerOptions`.

    Attributes:
        app: the ASGI application.
        generation, not_shared: what runs requests, and why they do not share forward passes; empty if they do.

    Raises:
        UnsupportedProblem: for continuous batching on a CPU, where Transformers' does not answer; for graphs that the
            model does not allow.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        max_tokens: int | None = None,
        continuous_batching: bool | None = None,
        graphs: bool | None = None,
        cache_memory: float | None = None,
        temperature: float | None = None,
    ) -> None:
        self.name, self.model, self.tokenizer, self.temperature = name, model, tokenizer, temperature
        config = model.config.get_text_config()
        context = context_length(model)
        characters = None if context is None else context * longest_token(tokenizer)
        self.limits = limits = Limits(context, max_tokens, characters=characters, vocabulary=config.vocab_size)
        self.metrics = ServerMetrics(name=name, model=model)
        self._stopping = threading.Event()
        self.generation, self.not_shared = choose_generation(
            model, self.metrics, self._stopping, shared=continuous_batching, graphs=graphs, cache_memory=cache_memory
        )
        self.prompts = PromptReader(tokenizer, limits)
        about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "polymoe"}
        self._model = {**about, "max_model_len": context}
        # A redirect's address would contain the Host header, which may be anything.
        self.app = FastAPIOffline(
            title="polymoe",
            version="1",
            redoc_url=None,
            redirect_slashes=False,
            dependencies=[Security(HTTPBearer(auto_error=False))],  # for /docs; the gate checks the key
        )
        small = Threads("polymoe small prompts", 2)
        large = Threads("polymoe large prompts")  # each takes 100 times its size in memory
        for path, kind in (("/v1/chat/completions", _Chat), ("/v1/completions", _Completion)):
            body = {"required": True, "content": {"application/json": {"schema": kind.kind.model_json_schema()}}}
            self.app.add_api_route(
                path, kind(self, small, large).answer, methods=["POST"], openapi_extra={"requestBody": body}
            )
        self.app.add_api_route("/v1/models", self._list)
        self.app.add_api_route("/v1/models/{name:path}", self._one)
        for path, get in (("/health", self._health), ("/metrics", self._metrics)):
            self.app.add_api_route(path, get)
        answer_errors(self.app)

    def end(self) -> None:
        """End every generation at its next token. Answers that it cuts off end with an error."""
        self._stopping.set()

    def close(self, timeout_s: float = 20.0) -> bool:
        """:meth:`end`, then wait until no generation runs, at most ``timeout_s`` seconds; whether that is so then."""
        self.end()
        return self.generation.close(timeout_s)

    async def _list(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def _one(self, name: str) -> JSONResponse:
        if name != self._model["id"]:
            raise _other_model(name, self._model["id"])
        return JSONResponse(self._model)

    async def _health(self) -> JSONResponse:
        if not self.generation.alive():
            return JSONResponse({"status": "unhealthy", "reason": "continuous batching has stopped"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self) -> Response:
        text = await asyncio.to_thread(self.metrics.text)  # it may wait for the GPU
        return Response(text, media_type=self.metrics.content_type)


def _other_model(asked: str, own: str) -> HTTPException:
    message = f"this server has the model {own!r}, not {asked[:80]!r}"
    return refusal(message, param="model", code="model_not_found", status=404)


# --- Requests -------------------------------------------------------------------------------------------------------


class _Endpoint:
    """Reads and checks a request, has its answers generated, and writes them."""

    kind: ClassVar[type[Any]]
    writer: ClassVar[type[Writer]]

    def __init__(self, server: ModelServer, small: Threads, large: Threads) -> None:
        self._server, self._small, self._large = server, small, large

    async def answer(self, request: Request) -> Response:
        """The response to a request."""
        given = request.headers.get("x-request-id", "")
        request.state.request_id = request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
        try:
            response = await self._answer(await request.body(), request_id)
        except HTTPException:
            raise
        except Exception as error:
            # An exception that leaves the application would close the connection as well.
            log.exception("a request failed")
            raise failed(error) from error
        response.headers["x-request-id"] = request_id
        return response

    async def _answer(self, content: bytes, request_id: str) -> Response:
        server, threads = self._server, self._large if len(content) > LARGE_BYTES else self._small
        request, out = current(), asyncio.Queue[ChoicePart]()
        settings, choices = await in_thread(threads, self._prepare, content, out)
        request.prompt_tokens = sum(len(choice.prompt) for choice in choices if choice.counts_prompt)
        writer = self.writer(request_id, server.name, server.tokenizer)

        def on_token() -> None:
            server.metrics.generated(request)

        def on_end() -> None:
            if all(choice.ended for choice in choices):
                server.metrics.ended(request)

        def leave(why: HTTPException) -> None:
            for choice in choices:
                choice.fail(why)

        for choice in choices:
            choice.on_token, choice.on_end = on_token, on_end
        request.on_leave(leave)
        server.generation.start(choices, request)
        if settings.stream:
            usage, continuous = settings.include_usage, settings.continuous_usage
            events = stream_answers(choices, out, writer, include_usage=usage, continuous=continuous)
            # nginx would otherwise keep a stream until its end.
            return StreamingResponse(events, headers={"x-accel-buffering": "no"}, media_type="text/event-stream")
        return JSONResponse(await whole_answers(choices, out, writer))

    def _prepare(self, content: bytes, out: asyncio.Queue[ChoicePart]) -> tuple[GenerationSettings, list[AnswerChoice]]:
        """Check a request and read its prompts, in a thread; return its settings, and answers that have not begun."""
        server, choices = self._server, list[AnswerChoice]()
        request = read_request(parse_object(content), self.kind)
        if request.model not in (None, server.name):
            raise _other_model(request.model, server.name)
        config = server.model.generation_config
        settings = with_defaults(settings_of(request, server.limits), config, server.temperature)
        prompts = self._prompts(request)
        if len(prompts) * settings.n > MAX_ANSWERS:
            raise refusal(f"n must be at most {MAX_ANSWERS // len(prompts)} with {len(prompts)} prompts", param="n")
        ends = () if settings.ignore_eos else end_tokens(config)
        ends = (*ends, *settings.stop_token_ids)
        for prompt in prompts:
            most = server.limits.bound(len(prompt), settings.max_tokens or 1)
            for number in range(settings.n):
                sampler, reader = TokenSampler(settings, prompt, ends, number), self._reader(request, prompt)
                index, first = len(choices), number == 0
                choices.append(AnswerChoice(index, prompt, ends, most, sampler, reader, out, counts_prompt=first))
        return settings, choices

    def _prompts(self, request: Any) -> list[list[int]]:
        raise NotImplementedError

    def _reader(self, request: Any, prompt: list[int]) -> ReplyReader:
        raise NotImplementedError


class _Chat(_Endpoint):
    """``/v1/chat/completions``."""

    kind, writer = ChatRequest, ChatWriter

    def _prompts(self, request: ChatRequest) -> list[list[int]]:
        if request.messages is None:
            raise refusal("messages must be a list with at least one message", param="messages")
        return [self._server.prompts.of_chat(request)]

    def _reader(self, request: ChatRequest, prompt: list[int]) -> ReplyReader:
        return ReplyReader(self._server.model, self._server.tokenizer, prompt, tools=request.tools)


class _Completion(_Endpoint):
    """``/v1/completions``."""

    kind, writer = CompletionRequest, CompletionWriter

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        if request.prompt is None:
            raise refusal(f"prompt must be {CompletionRequest.model_fields['prompt'].description}", param="prompt")
        return self._server.prompts.of_completion(request.prompt)

    def _reader(self, request: CompletionRequest, prompt: list[int]) -> ReplyReader:
        return ReplyReader(self._server.model, self._server.tokenizer, prompt, raw=True)
