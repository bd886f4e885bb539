"""Transformers' OpenAI-compatible server around one loaded model: what it can do, bounded to what one may ask of it.

Transformers brings endpoints, chat templates, streaming and generation (its ``transformers serve``). Added here: one
model that no request can replace or unload, requests that are checked before they run, a clean refusal of prompts
longer than the context, errors in OpenAI's form, and generation that ends when its client has gone.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import inspect
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import wait
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polymoe.errors import MissingDependency, UnsupportedProblem

try:
    from fastapi import FastAPI
    from transformers import ContinuousBatchingConfig, StoppingCriteria, StoppingCriteriaList
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, GenerateManager, GenerationState
except (ImportError, NameError) as error:  # NameError: what Transformers' modules raise without fastapi or openai
    raise MissingDependency(
        "polymoe serve",
        expected="transformers with its serving extra",
        got=str(error),
        hint="pip install 'polymoe[serve]'",
    ) from error

from polymoe.engines.openai_requests import answer_errors, check_request, refusal

__all__ = ["CLIENT_GONE", "Limits", "ModelServer"]

CLIENT_GONE: ContextVar[threading.Event | None] = ContextVar("CLIENT_GONE", default=None)
"""Set by whoever watches the connection; generation for this request ends soon after the event is set."""

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
"""What stays of Transformers' server. The rest would load or unload models, or is not tested here."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for.

    Attributes:
        context: most tokens of prompt and answer together, or None for no limit.
        max_tokens: most tokens of an answer, or None for what fits in the context.
    """

    context: int | None
    max_tokens: int | None = None

    def bound(self, prompt_tokens: int, wanted: int | None) -> int | None:
        """Tokens that the answer may have.

        Raises:
            HTTPException: 400 for a prompt that is empty or leaves no room in the context.
        """
        if prompt_tokens < 1:
            raise refusal("the prompt is empty")
        if self.context is not None and prompt_tokens >= self.context:
            raise refusal(
                f"the prompt has {prompt_tokens} tokens; a context of {self.context} holds prompt and answer",
                code="context_length_exceeded",
            )
        room = None if self.context is None else self.context - prompt_tokens
        return min((n for n in (wanted, self.max_tokens, room) if n is not None), default=None)


class ModelServer:
    """The application for one model, in :attr:`app` (ASGI), and the ways to end its generations.

    Args:
        model, tokenizer: as :func:`polymoe.engines.transformers.load` returns them.
        name: what clients call the model.
        max_tokens: most tokens of one answer.
        continuous_batching: Transformers' own, for CUDA: requests share forward passes, and all of them the sampling
            settings of the first.

    Raises:
        UnsupportedProblem: for continuous batching on a CPU, where it does not answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        max_tokens: int | None = None,
        continuous_batching: bool = False,
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
        self._generation = _Generation(name, limits, continuous_batching)
        handlers = {
            "chat_handler": _Chat(manager, self._generation),
            "completion_handler": _Completion(manager, self._generation),
        }
        # Handlers differ between versions of Transformers; endpoints without one are taken out below.
        wanted = [p for p in inspect.signature(build_server).parameters if p.endswith("_handler")]
        build: Any = build_server
        self.app: FastAPI = build(
            model_manager=manager,
            generation_state=self._generation,
            **{parameter: handlers.get(parameter) for parameter in wanted},
        )
        self.app.router.routes[:] = [r for r in self.app.router.routes if getattr(r, "path", None) in ENDPOINTS]
        answer_errors(self.app)

    def end(self) -> None:
        """End every generation at its next token; answers are cut short, not broken off."""
        self._generation.stopping.set()

    def close(self, timeout_s: float = 20.0) -> None:
        """:meth:`end`, and wait until the model rests, at most ``timeout_s`` seconds."""
        self.end()
        self._generation.close(timeout_s)


class _OneModel(ModelManager):
    """Transformers' model manager, with one model that is there from the start and stays."""

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


# --- Generation -----------------------------------------------------------------------------------------------------


class _Stop(StoppingCriteria):
    """Ends a generation at its next token once any of the events is set."""

    def __init__(self, *events: threading.Event) -> None:
        self.events = events

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        stop = any(event.is_set() for event in self.events)
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)


class _Bounded:
    """Bounds what a manager of Transformers generates; every endpoint passes here with its tokens counted.

    Managers tell requests apart by an id that comes from a header. Two clients may send the same, so it is replaced.
    """

    limits: Limits

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        inputs, own_id = self._bound(inputs, gen_config), uuid.uuid4().hex
        return super().generate_streaming(  # type: ignore[misc]
            model, processor, inputs, gen_config, request_id=own_id, response_parser=response_parser
        )

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        inputs, own_id = self._bound(inputs, gen_config), uuid.uuid4().hex
        return await super().generate_non_streaming(  # type: ignore[misc]
            model, processor, inputs, gen_config, request_id=own_id
        )

    def _bound(self, inputs: Mapping[str, Any], gen_config: Any) -> dict[str, Any]:
        ids = inputs["input_ids"]
        count = len(ids) if isinstance(ids, list) else ids.shape[-1]
        gen_config.max_new_tokens = self.limits.bound(count, gen_config.max_new_tokens)
        return dict(inputs)


class _Sequential(_Bounded, GenerateManager):
    def __init__(self, limits: Limits, stopping: threading.Event) -> None:
        super().__init__()
        self.limits, self.stopping = limits, stopping

    def _bound(self, inputs: Mapping[str, Any], gen_config: Any) -> dict[str, Any]:
        gone = CLIENT_GONE.get() or threading.Event()
        stop = StoppingCriteriaList([_Stop(gone, self.stopping)])
        return {**super()._bound(inputs, gen_config), "stopping_criteria": stop}


class _Batched(_Bounded, CBGenerateManager):
    def __init__(self, limits: Limits) -> None:
        # Capture needs kernels that never look at a tensor's values, which the plan of a layer need not have.
        super().__init__(cb_config=ContinuousBatchingConfig(use_cuda_graph=False))
        self.limits = limits


class _Generation(GenerationState):
    """Transformers' generation state, with one bounded manager."""

    def __init__(self, name: str, limits: Limits, continuous_batching: bool) -> None:
        super().__init__(continuous_batching=continuous_batching)
        self.stopping = threading.Event()
        self._sequential = _Sequential(limits, self.stopping)
        if continuous_batching:
            self._cb_manager, self._cb_model_id = _Batched(limits), name

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return super().get_manager(model_id, use_cb=True) if use_cb else self._sequential

    def close(self, timeout_s: float) -> None:
        self.shutdown()
        # The thread takes calls in turn: once this one has passed, those before it have ended.
        wait([self._sequential.submit(lambda: None)], timeout_s)


# --- Requests -------------------------------------------------------------------------------------------------------


class _Checked(BaseHandler):
    def _validate_request(self, body: dict) -> None:
        check_request(body)
        own = {name: body.pop(name) for name in ("ignore_eos",) if name in body}  # none of OpenAI's
        super()._validate_request(body)
        body |= own

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        config = super()._build_generation_config(body, model_generation_config, use_cb)
        if body.get("ignore_eos"):
            config.eos_token_id = -1  # no token; None would be filled from the model's defaults
        return config


class _Chat(_Checked, ChatCompletionHandler):
    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise refusal("messages must be a list with at least one message")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise refusal("each message must be an object with a role")
        model, tokenizer = self.model_manager.load_model_and_processor("")
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters
        for name in body.get("chat_template_kwargs", ()):
            if name in reserved:
                raise refusal(f"chat_template_kwargs must not set {name}")
        bias = body.get("logit_bias", {})
        vocabulary = model.config.get_text_config().vocab_size
        if not all(token.isdecimal() and int(token) < vocabulary for token in bias):
            raise refusal(f"logit_bias must name tokens from 0 to {vocabulary - 1}")
        body["logit_bias"] = {token: float(value) for token, value in bias.items()} or None

    def get_processor_inputs_from_messages(self, messages: list[dict], modality: Any) -> list[dict]:  # type: ignore[override]
        try:
            return BaseHandler.get_processor_inputs_from_messages(messages, modality)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise refusal(f"a message's content or tool call is not understood: {error!r}") from error


class _Completion(_Checked, CompletionHandler):
    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        if not isinstance(body.get("prompt"), str):
            raise refusal("prompt must be a string")
