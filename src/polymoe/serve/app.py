"""ModelServer: the application of Transformers' OpenAI-compatible server, restricted to one loaded model.

Endpoints, chat templates, streaming, generation and the parsing of reasoning and tool calls are Transformers' own
(``transformers serve``). This module adds a model that no request can replace or unload, checks of every field before
anything runs, a clear error for prompts longer than the context, stop strings, metrics, and errors in OpenAI's form.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import inspect
import logging
import time
from typing import Any

from polymoe.errors import MissingDependency, UnsupportedProblem

try:
    from fastapi import FastAPI, HTTPException, Response
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import BaseHandler, CBWorkerDeadError

    from polymoe.serve.continuous_batching import Batching
    from polymoe.serve.errors import answer_errors, error_body, refusal
    from polymoe.serve.generation import Generation
    from polymoe.serve.in_flight import current
    from polymoe.serve.metrics import ServerMetrics
    from polymoe.serve.requests import OWN_FIELDS, Limits, check_request
    from polymoe.serve.streams import finish_stream, until_stop
except (ImportError, NameError) as error:  # Transformers' modules raise NameError without fastapi or openai
    if isinstance(error, MissingDependency):
        raise
    raise MissingDependency(
        "polymoe serve",
        expected="transformers with its serving extra",
        got=str(error),
        hint="pip install 'polymoe[serve]'",
    ) from error

__all__ = ["ENDPOINTS", "Limits", "ModelServer"]

log = logging.getLogger("polymoe")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
"""The endpoints that are kept. The others of Transformers' server load or unload models, or are not tested here."""


class ModelServer:
    """The application for one model, its metrics, and the ways to end it.

    Args:
        model, tokenizer: as :func:`polymoe.engines.transformers.load` returns them.
        name: the model's name in requests and answers.
        max_tokens: maximum number of tokens in an answer; None if only the context limits it.
        continuous_batching: Transformers' own, for CUDA: requests share forward passes, and all of them use the
            sampling settings of the first.
        graphs: replay small steps of continuous batching from CUDA graphs; None means wherever possible.
        cache_memory: share of the GPU's free memory for keys and values of continuous batching; None is Transformers'
            default.

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
    ) -> None:
        if continuous_batching and model.device.type != "cuda":
            raise UnsupportedProblem(
                "continuous batching",
                expected="a CUDA device",
                got=str(model.device),
                hint="serve without it: requests then run one after the other",
            )
        limits = Limits(getattr(model.config.get_text_config(), "max_position_embeddings", None), max_tokens)
        manager = _OneModel(name, model, tokenizer)
        self.metrics = ServerMetrics(name=name, model=model)
        batching = Batching.of(model, graphs=graphs, cache_memory=cache_memory) if continuous_batching else None
        self.generation = Generation(name, limits, self.metrics, batching=batching)
        handlers = {
            "chat_handler": _Chat(manager, self.generation),
            "completion_handler": _Completion(manager, self.generation),
        }
        # Handlers differ between versions of Transformers; the endpoints of those that are None are removed below.
        parameters = [p for p in inspect.signature(build_server).parameters if p.endswith("_handler")]
        build: Any = build_server
        self.app: FastAPI = build(
            model_manager=manager,
            generation_state=self.generation,
            **{parameter: handlers.get(parameter) for parameter in parameters},
        )
        self.app.router.routes[:] = [r for r in self.app.router.routes if getattr(r, "path", None) in ENDPOINTS]
        self.app.add_api_route("/metrics", self._metrics)
        self.app.add_exception_handler(CBWorkerDeadError, _worker_died)
        answer_errors(self.app)

    def end(self) -> None:
        """End every generation at its next token: the answers are complete, but shorter."""
        self.generation.stopping.set()

    def close(self, timeout_s: float = 20.0) -> None:
        """:meth:`end`, then wait until no generation runs, at most ``timeout_s`` seconds."""
        self.end()
        self.generation.close(timeout_s)

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)


class _OneModel(ModelManager):
    """Transformers' model manager, with one model that is loaded already and is never unloaded."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        super().__init__(device=str(model.device))
        self.force_model = name
        self._loaded = model, tokenizer
        self._since = int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._loaded

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # type: ignore[override]
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "polymoe"}]


# --- Requests -------------------------------------------------------------------------------------------------------


async def _worker_died(_: Any, error: Any) -> JSONResponse:
    return JSONResponse(error_body(str(error), kind="server_error"), status_code=503)


class _Checked(BaseHandler):
    """Checks a request before Transformers' handler reads it."""

    generation_state: Generation

    async def handle_request(self, body: dict, request_id: str) -> Any:
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except (HTTPException, TemplateError, CBWorkerDeadError):
            raise
        except Exception as error:
            # An exception that leaves the application would close the connection as well.
            log.exception("a request failed")
            detail = error_body(f"generation failed: {error}", kind="server_error")
            raise HTTPException(500, detail=detail) from error

    def _validate_request(self, body: dict) -> None:
        fields: Any = getattr(self._valid_params_class, "__mutable_keys__", ())
        check_request(body, frozenset(fields) | OWN_FIELDS)
        for name in ("max_tokens", "max_completion_tokens"):
            if name in body:
                self.generation_state.limits.check(name, body[name])
        if "stop" in body and self.generation_state.continuous_batching:
            raise refusal("stop must be omitted: continuous batching does not support it", param="stop")
        own = {name: body.pop(name) for name in OWN_FIELDS if name in body}
        super()._validate_request(body)
        body |= own

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        request = current()
        stop = body.pop("stop", ())
        # Transformers searches the vocabulary for stop strings, which fails for some, and keeps them in the text.
        request.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        # Transformers would set the seed here and now, while another request may be sampling.
        request.seed = body.pop("seed", None)
        config = super()._build_generation_config(body, model_generation_config, use_cb)
        if body.get("temperature"):
            config.do_sample = True
        if body.get("ignore_eos"):
            config.eos_token_id = -1  # no token; Transformers would replace None by the model's default
        return config

    def _streaming(self, *args: Any, **kwargs: Any) -> Any:
        response = super()._streaming(*args, **kwargs)  # type: ignore[misc]
        response.body_iterator = finish_stream(response.body_iterator)
        return response


class _Chat(_Checked, ChatCompletionHandler):
    """``/v1/chat/completions``."""

    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise refusal("messages must be a list with at least one message")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise refusal("each message must be an object with a role")
        if "reasoning_effort" in body:  # chat templates read it under this name
            body["chat_template_kwargs"] = {
                "reasoning_effort": body.pop("reasoning_effort"),
                **body.get("chat_template_kwargs", {}),
            }
        if body.get("tool_choice") == "none":
            body.pop("tools", None)
        model, tokenizer = self.model_manager.load_model_and_processor("")
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters
        for name in body.get("chat_template_kwargs", ()):
            if name in reserved:
                raise refusal(f"chat_template_kwargs must not set {name}")
        bias = body.get("logit_bias", {})
        vocabulary = model.config.get_text_config().vocab_size
        if not all(token.isdecimal() and len(token) < 10 and int(token) < vocabulary for token in bias):
            raise refusal(f"logit_bias must name tokens from 0 to {vocabulary - 1}")
        body["logit_bias"] = {token: float(value) for token, value in bias.items()} or None

    def get_processor_inputs_from_messages(self, messages: list[dict], modality: Any) -> list[dict]:  # type: ignore[override]
        try:
            return BaseHandler.get_processor_inputs_from_messages(messages, modality)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise refusal(f"a message's content or tool call cannot be read: {error!r}") from error

    def _build_completion(self, request_id: str, content: str, *args: Any, **kwargs: Any) -> dict:
        return super()._build_completion(request_id, until_stop(content, current().stop), *args, **kwargs)


class _Completion(_Checked, CompletionHandler):
    """``/v1/completions``."""

    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        if not isinstance(body.get("prompt"), str):
            raise refusal("prompt must be a string")
