"""One generation after the other: the manager that Transformers' handlers call unless requests share forward passes.

Transformers runs ``model.generate`` in a thread and has no way to take back a call that waits, to end one early or to
count its tokens. Here calls wait in a :class:`CallQueue`, and the handlers get a :class:`RequestModel` instead of
the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from fastapi import HTTPException
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import GenerateManager

from polymoe.serve.errors import client_left, error_body
from polymoe.serve.in_flight import InFlight, current
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.requests import Limits, begin_generation
from polymoe.serve.streams import StopQueue, until_stop

__all__ = ["CallQueue", "RequestModel", "SequentialManager"]

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
        self.calls = CallQueue()  # instead of Transformers' thread, whose pending calls cannot be removed

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        request = begin_generation(inputs, gen_config, self.limits)
        request_model: Any = RequestModel(model, processor, request, self, streaming=True)
        queue, streamer = super().generate_streaming(
            request_model, processor, inputs, gen_config, request_id, response_parser=response_parser
        )
        return (StopQueue(queue, request.stop) if request.stop else queue), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        request = begin_generation(inputs, gen_config, self.limits)
        request_model: Any = RequestModel(model, processor, request, self, streaming=False)
        text, length, ids = await super().generate_non_streaming(
            request_model, processor, inputs, gen_config, request_id
        )
        return until_stop(text, request.stop), length, ids

    def submit(self, fn: Callable, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.calls.add(current(), call)
        return future

    def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
        loop, request = asyncio.get_running_loop(), current()
        future = loop.create_future()

        def settle(set_: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set_(value)

        def call() -> None:
            try:
                settled = future.set_result, fn(*args, **kwargs)
            except Exception as error:
                settled = future.set_exception, error
            loop.call_soon_threadsafe(settle, *settled)

        self.calls.add(request, call)
        request.on_leave(lambda: settle(future.set_exception, client_left()))
        return future


class CallQueue:
    """Calls that wait for one thread, in order. The calls of a client that leaves are removed.

    There is one thread because compiled CUDA graphs belong to the thread that captured them.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[InFlight, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="polymoe generation").start()

    def __len__(self) -> int:
        """Number of calls that wait."""
        return len(self._calls)

    def add(self, request: InFlight, call: Callable[[], None]) -> None:
        """Append a call for ``request``."""
        with self._changed:
            self._calls.append((request, call))
            self._changed.notify()
        request.on_leave(lambda: self._remove(request))

    def _remove(self, request: InFlight) -> None:
        with self._changed:
            self._calls = deque(waiting for waiting in self._calls if waiting[0] is not request)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                _, call = self._calls.popleft()
            try:
                call()
            except RuntimeError as error:  # the event loop is closed: the server stopped before this answer
                log.debug("an answer came after the server stopped: %s", error)
            del _, call  # free the prompt and the answer


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
        if request.seed is not None:
            torch.manual_seed(request.seed)
        criterion = _EachToken(request, metrics, stopping, self._processor)
        try:
            return self._model.generate(**kwargs, stopping_criteria=StoppingCriteriaList([criterion]))
        except Exception as error:
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
        self._tokenizer = getattr(processor, "tokenizer", processor)._tokenizer if request.stop else None
        self._stream = DecodeStream(skip_special_tokens=True)
        self._longest = max(map(len, request.stop), default=0)
        self._tail = ""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self._metrics.generated(self._request)
        stop = self._request.gone.is_set() or self._stopping.is_set() or self._found_stop(input_ids)
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)

    def _found_stop(self, input_ids: Tensor) -> bool:
        if self._tokenizer is None:
            return False
        self._tail += self._stream.step(self._tokenizer, int(input_ids[0, -1])) or ""
        found = any(stop in self._tail for stop in self._request.stop)
        self._tail = self._tail[-self._longest :]
        return found
