"""ModelServer: the application of an OpenAI-compatible server for one loaded model.

Streaming, generation and the parsing of reasoning and tool calls are Transformers' own (``transformers serve``). This
module adds a model that no request can replace or unload, checks of every field before anything runs, prompts that are
read beside the event loop, stop strings, metrics, and errors in OpenAI's form.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from polymoe.errors import MissingDependency, UnsupportedProblem
from polymoe.install_command import install_hint

try:
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.utils import BaseHandler, CBWorkerDeadError

    from polymoe.serve.continuous_batching import Batching
    from polymoe.serve.errors import answer_errors, error_body, refusal
    from polymoe.serve.generation import Generation
    from polymoe.serve.in_flight import current
    from polymoe.serve.limits import Limits
    from polymoe.serve.metrics import ServerMetrics
    from polymoe.serve.prompts import Preparation, PromptReader, longest_token
    from polymoe.serve.requests import CHAT_FIELDS, COMPLETION_FIELDS, Field, check_fields, settings_of
    from polymoe.serve.sampling import check_shared, generation_config
    from polymoe.serve.settings import GenerationSettings
    from polymoe.serve.streams import finish_stream, until_stop
    from polymoe.serve.strict_json import parse_object
except (ImportError, NameError) as error:  # Transformers' modules raise NameError without fastapi or openai
    if isinstance(error, MissingDependency):
        raise
    raise MissingDependency(
        "polymoe serve",
        expected="transformers with its serving extra",
        got=str(error),
        hint=install_hint("serve"),
    ) from error

__all__ = ["Limits", "ModelServer"]

log = logging.getLogger("polymoe")

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class ModelServer:
    """The application for one model, its metrics, and the ways to end it.

    Args:
        model, tokenizer: as :func:`polymoe.engines.transformers.load` returns them.
        name: the model's name in requests and answers.
        max_tokens: maximum number of tokens in an answer; None if only the context limits it.
        continuous_batching: Transformers' own, for CUDA: requests share forward passes and sampling settings.
        graphs: replay small steps of continuous batching from CUDA graphs; None means wherever possible.
        cache_memory: share of the GPU's free memory for keys and values of continuous batching; None is Transformers'
            default.
        temperature: of all requests that share forward passes; None is the checkpoint's own.

    Attributes:
        app: the ASGI application.
        metrics: what it counts.
        generation: which managers run its requests.

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
        continuous_batching: bool = False,
        graphs: bool | None = None,
        cache_memory: float | None = None,
        temperature: float | None = None,
    ) -> None:
        if continuous_batching:
            _require_cuda(model)
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        characters = None if context is None else context * longest_token(tokenizer)
        limits = Limits(context, max_tokens, characters=characters, vocabulary=config.vocab_size)
        self.metrics = ServerMetrics(name=name, model=model)
        batching = None
        if continuous_batching:
            batching = Batching.of(model, graphs=graphs, cache_memory=cache_memory, temperature=temperature)
        self.generation = Generation(name, limits, self.metrics, batching=batching)
        prompts = PromptReader(tokenizer, limits, None if batching else model.device)
        self._preparation = Preparation()
        self._models = [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "polymoe"}]
        # A redirect's address would contain the Host header, which may be anything.
        self.app = FastAPI(openapi_url=None, redirect_slashes=False)
        for path, endpoint in (("/v1/chat/completions", _Chat), ("/v1/completions", _Completion)):
            answer = endpoint(name, model, tokenizer, limits, prompts, self._preparation, self.generation).answer
            self.app.add_api_route(path, answer, methods=["POST"])
        for path, get in (("/v1/models", self._list), ("/health", self._health), ("/metrics", self._metrics)):
            self.app.add_api_route(path, get)
        self.app.add_exception_handler(CBWorkerDeadError, _worker_died)
        answer_errors(self.app)

    def end(self) -> None:
        """End every generation at its next token: the answers are complete, but shorter."""
        self.generation.stopping.set()

    def close(self, timeout_s: float = 20.0) -> bool:
        """:meth:`end`, then wait until no generation runs, at most ``timeout_s`` seconds.

        Returns:
            Whether no thread computes any more: neither an answer nor a prompt.
        """
        self.end()
        return self.generation.close(timeout_s) and not self._preparation.busy

    async def _list(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": self._models})

    async def _health(self) -> JSONResponse:
        if not self.generation.is_cb_alive():
            return JSONResponse({"status": "unhealthy", "reason": "cb_worker_dead"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)


def _require_cuda(model: Any) -> None:
    if model.device.type != "cuda":
        raise UnsupportedProblem(
            "continuous batching",
            expected="a CUDA device",
            got=str(model.device),
            hint="serve without it: requests then run one after the other",
        )


async def _worker_died(_: Any, error: Any) -> JSONResponse:
    return JSONResponse(error_body(str(error), kind="server_error"), status_code=503)


# --- Requests -------------------------------------------------------------------------------------------------------


class _Endpoint(BaseHandler):
    """Reads and checks a request, and lets Transformers' handler generate and write the answer."""

    fields: Mapping[str, Field]
    generation_state: Generation

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        limits: Limits,
        prompts: PromptReader,
        preparation: Preparation,
        generation: Generation,
    ) -> None:
        super().__init__(model_manager=None, generation_state=generation)  # type: ignore[arg-type]  # one model
        self._name, self._model, self._tokenizer = name, model, tokenizer
        self._limits, self._prompts, self._preparation = limits, prompts, preparation

    async def answer(self, request: Request) -> Response:
        """The response to a request."""
        given = request.headers.get("x-request-id", "")
        request.state.request_id = request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
        try:
            response = await self._answer(await request.body(), request_id)
        except (HTTPException, CBWorkerDeadError):
            raise
        except Exception as error:
            # An exception that leaves the application would close the connection as well.
            log.exception("a request failed")
            detail = error_body(f"generation failed: {error}", kind="server_error")
            raise HTTPException(500, detail=detail) from error
        response.headers["x-request-id"] = request_id
        return response

    async def _answer(self, content: bytes, request_id: str) -> Any:
        settings, tools, inputs = await self._preparation.run(len(content), self._prepare, content)
        current().settings = settings
        generation = self.generation_state
        shared = generation.continuous_batching
        manager = generation.get_manager(self._name, use_cb=shared)
        if shared:
            manager.init_cb(self._model, manager.config(self._model))
        respond: Any = self._streaming if settings.stream else self._non_streaming  # type: ignore[attr-defined]
        options = {"tools": tools} if "tools" in inspect.signature(respond).parameters else {}
        config = generation_config(self._model.generation_config, settings, shared=shared)
        response = respond(
            request_id, self._model, self._tokenizer, self._name, inputs, config, gen_manager=manager, **options
        )
        if not settings.stream:
            return await response
        response.body_iterator = finish_stream(response.body_iterator)
        return response

    def _prepare(self, content: bytes) -> tuple[GenerationSettings, Any, Any]:
        """GenerationSettings, tools and the tokenizer's output. Called in a thread."""
        said = check_fields(parse_object(content), self.fields)
        if said.get("model", self._name) != self._name:
            message = f"this server has the model {self._name!r}, not {said['model'][:80]!r}"
            raise refusal(message, param="model", code="model_not_found")
        settings = settings_of(said, self._limits)
        if self.generation_state.continuous_batching:
            manager = self.generation_state.get_manager(self._name, use_cb=True)
            check_shared(settings, manager.config(self._model))
        return settings, said.get("tools"), self._prompt(said)

    def _prompt(self, said: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _build_chunk_sse(self, *args: Any, usage: Any = None, **fields: Any) -> str:
        if usage is None or not current().settings.include_usage:
            return super()._build_chunk_sse(*args, usage=usage, **fields)  # type: ignore[misc]
        last = super()._build_chunk_sse(*args, **fields)  # type: ignore[misc]
        chunk = json.loads(last.removeprefix("data: "))
        counts = {**chunk, "choices": [], "usage": usage.model_dump(exclude_none=True)}
        return f"{last}data: {json.dumps(counts)}\n\n"


class _Chat(_Endpoint, ChatCompletionHandler):
    """``/v1/chat/completions``."""

    fields = CHAT_FIELDS

    def _prompt(self, said: dict[str, Any]) -> Any:
        if "messages" not in said:
            raise refusal("messages must be a list with at least one message", param="messages")
        return self._prompts.of_chat(said)

    def _build_completion(self, request_id: str, content: str, *args: Any, **kwargs: Any) -> dict:
        return super()._build_completion(request_id, until_stop(content, current().settings.stop), *args, **kwargs)


class _Completion(_Endpoint, CompletionHandler):
    """``/v1/completions``."""

    fields = COMPLETION_FIELDS

    def _prompt(self, said: dict[str, Any]) -> Any:
        if "prompt" not in said:
            raise refusal("prompt must be a string", param="prompt")
        return self._prompts.of_text(said["prompt"])
