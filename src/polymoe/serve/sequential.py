"""One generation after the other: the manager that Transformers' handlers call unless requests share forward passes.

Transformers runs ``model.generate`` in a thread and has no way to take back a call that waits, to end one early or to
count its tokens. Here calls wait in a :class:`~polymoe.serve.call_queue.CallQueue`, and the handlers get a
:class:`RequestModel` instead of the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from fastapi import HTTPException
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import GenerateManager

from polymoe.serve.call_queue import CallQueue
from polymoe.serve.errors import error_body
from polymoe.serve.in_flight import InFlight
from polymoe.serve.limits import Limits, begin_generation
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.sampling import logits_processors
from polymoe.serve.streams import StopQueue, until_stop

__all__ = ["RequestModel", "SequentialManager"]

log = logging.getLogger("polymoe")


class SequentialManager(GenerateManager):
    """Runs one generation at a time, in the order of the requests.

    Args:
        limits: of every request.
        metrics: counts tokens and times.
        stopping: once set, the running generation ends at its next token, and those that wait are refused.
    """

    def __init__(self, limits: Limits, metrics: ServerMetrics, stopping: threading.Event) -> None:
        self.limits, self.metrics, self.stopping = limits, metrics, stopping
        # Instead of Transformers' thread, whose pending calls cannot be removed. It is one thread because compiled CUDA
        # graphs belong to the thread that captured them.
        self.calls = CallQueue("polymoe generation")

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        request = begin_generation(inputs, gen_config, self.limits)
        request_model: Any = RequestModel(model, processor, request, self, streaming=True)
        queue, streamer = super().generate_streaming(
            request_model, processor, inputs, gen_config, request_id, response_parser=response_parser
        )
        stop = request.settings.stop
        return (StopQueue(queue, stop) if stop else queue), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        request = begin_generation(inputs, gen_config, self.limits)
        request_model: Any = RequestModel(model, processor, request, self, streaming=False)
        text, length, ids = await super().generate_non_streaming(
            request_model, processor, inputs, gen_config, request_id
        )
        return until_stop(text, request.settings.stop), length, ids

    def submit(self, fn: Callable, *args: Any, **kwargs: Any) -> Future:
        return self.calls.submit(fn, *args, **kwargs)

    def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
        return self.calls.async_submit(fn, *args, **kwargs)


class RequestModel:
    """The model as one request's handler sees it: :meth:`generate` can be ended, and is counted."""

    def __init__(
        self, model: Any, processor: Any, request: InFlight, manager: SequentialManager, *, streaming: bool
    ) -> None:
        self._model, self._processor, self._request, self._manager = model, processor, request, manager
        self._streaming = streaming

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **kwargs: Any) -> Any:
        """The model's ``generate``, which ends early at a stop string, or when the client leaves or the server stops.

        Raises:
            HTTPException: 503 if the server is stopping, 500 if the model fails; for a stream a RuntimeError, whose
                message Transformers puts into the stream.
        """
        request, metrics, stopping = self._request, self._manager.metrics, self._manager.stopping
        if stopping.is_set():
            raise self._answerable(HTTPException(503, detail=error_body("the server is stopping", kind="server_error")))
        metrics.started(request)
        if request.settings.seed is not None:
            torch.manual_seed(request.settings.seed)
        criteria = StoppingCriteriaList([_EachToken(request, metrics, stopping, self._processor)])
        processors = logits_processors(request.settings, request.prompt_tokens)
        try:
            return self._model.generate(**kwargs, stopping_criteria=criteria, logits_processor=processors)
        except BaseException as error:  # the tokenizers package has errors that are no Exception
            if request.gone.is_set():  # Transformers ends the stream of a client that left by an exception
                raise
            log.exception("generation failed")
            detail = error_body(f"generation failed: {error}", kind="server_error")
            raise self._answerable(HTTPException(500, detail=detail)) from error
        finally:
            metrics.ended(request)

    def _answerable(self, error: HTTPException) -> Exception:
        """The error in the form in which it reaches the client."""
        if not self._streaming:
            return error
        # Transformers puts a stream's error between quotation marks without escaping it.
        detail: Any = error.detail
        return RuntimeError(json.dumps(detail["error"]["message"])[1:-1])


class _EachToken(StoppingCriteria):
    """Counts each token; ends the generation at a stop string, or if nobody waits for more."""

    def __init__(self, request: InFlight, metrics: ServerMetrics, stopping: threading.Event, processor: Any) -> None:
        self._request, self._metrics, self._stopping = request, metrics, stopping
        self._tokenizer = getattr(processor, "tokenizer", processor)._tokenizer if request.settings.stop else None
        self._stream = DecodeStream(skip_special_tokens=True)
        self._longest = max(map(len, request.settings.stop), default=0)
        self._tail = ""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self._metrics.generated(self._request)
        stop = self._request.gone.is_set() or self._stopping.is_set() or self._found_stop(input_ids)
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)

    def _found_stop(self, input_ids: Tensor) -> bool:
        if self._tokenizer is None:
            return False
        self._tail += self._stream.step(self._tokenizer, int(input_ids[0, -1])) or ""
        found = any(stop in self._tail for stop in self._request.settings.stop)
        self._tail = self._tail[-self._longest :]
        return found
