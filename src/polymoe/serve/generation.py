"""Generation as Transformers' server does it, for requests that wait in line, end early, and are counted.

Transformers' managers hand prompts to ``model.generate``. Here they get a :class:`_Turn` for the model, which is one
request's turn at it: it looks whether anybody still waits for the answer, ends it when nobody does, and counts tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import HTTPException
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import ContinuousBatchingConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager, GenerationState

from polymoe.engines.transformers import paged_attention as paged_attention
from polymoe.engines.transformers.decode_graph import require_capturable
from polymoe.errors import UnsupportedProblem
from polymoe.serve.in_flight import InFlight, current
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.requests import Limits, error_body
from polymoe.serve.streams import Counted, UpToStop, until_stop

__all__ = ["Batching", "Generation"]

log = logging.getLogger("polymoe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How requests share forward passes.

    Attributes:
        paged: whether attention is :mod:`polymoe.engines.transformers.paged_attention`'s, not Transformers'.
        graphs: whether small steps are replays of CUDA graphs, which needs the former.
        cache_memory: share of the GPU's free memory for keys and values; None is Transformers' own.
    """

    paged: bool = False
    graphs: bool = False
    cache_memory: float | None = None

    @classmethod
    def of(cls, model: Any, *, graphs: bool | None, cache_memory: float | None) -> Batching:
        """For a model on a GPU; ``graphs`` None is where they can be.

        Raises:
            UnsupportedProblem: if graphs are wanted and cannot be, naming what stands in the way.
        """
        paged = paged_attention.runs_on(model)
        if graphs and not paged:
            raise UnsupportedProblem(
                "CUDA graphs of continuous batching", expected="16 bit, a GPU since SM80, attention without a cap",
                got=type(model).__name__, hint="serve without them",
            )  # fmt: skip
        if graphs or (graphs is None and paged):
            try:
                require_capturable(model)
            except UnsupportedProblem as error:
                if graphs:
                    raise
                log.info("no CUDA graphs: %s", error)
                graphs = False
        return cls(paged=paged, graphs=paged if graphs is None else graphs, cache_memory=cache_memory)


class Generation(GenerationState):
    """Transformers' generation state for one model.

    Attributes:
        limits: of every request.
        stopping: once set, generations end at their next token, and those that wait are refused.
    """

    def __init__(self, name: str, limits: Limits, metrics: ServerMetrics, *, batching: Batching | None) -> None:
        super().__init__(continuous_batching=batching is not None)
        self.limits = limits
        self.stopping = threading.Event()
        self._sequential = _Sequential(limits, metrics, self.stopping)
        if batching is not None:
            self._cb_manager, self._cb_model_id = _Batched(limits, metrics, batching), name

    @property
    def continuous_batching(self) -> bool:
        """Whether requests share forward passes."""
        return self._continuous_batching

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return super().get_manager(model_id, use_cb=True) if use_cb else self._sequential

    def close(self, timeout_s: float) -> None:
        """Wait until the model rests, at most ``timeout_s`` seconds."""
        self.shutdown()
        # The thread takes calls in turn: once this one has passed, those before it have ended.
        wait([self._sequential.submit(lambda: None)], timeout_s)


class _Bounded:
    """Bounds what a manager of Transformers generates; every endpoint passes here with its tokens counted.

    Managers tell requests apart by an id that comes from a header. Two clients may send the same, so it is replaced.
    """

    limits: Limits
    metrics: ServerMetrics

    def _bound(self, inputs: Mapping[str, Any], gen_config: Any) -> InFlight:
        request, ids = current(), inputs["input_ids"]
        request.prompt_tokens = len(ids) if isinstance(ids, list) else ids.shape[-1]
        gen_config.max_new_tokens = self.limits.bound(request.prompt_tokens, gen_config.max_new_tokens)
        return request


class _Sequential(_Bounded, GenerateManager):
    """One generation after the other."""

    def __init__(self, limits: Limits, metrics: ServerMetrics, stopping: threading.Event) -> None:
        self.limits, self.metrics, self.stopping = limits, metrics, stopping
        self._line = _Line()  # in the place of Transformers' thread, whose calls cannot be taken back

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        request = self._bound(inputs, gen_config)
        turn = _Turn(model, processor, request, self, streaming=True)
        queue, streamer = super().generate_streaming(
            turn, processor, inputs, gen_config, request_id, response_parser=response_parser  # type: ignore[arg-type]
        )  # fmt: skip
        return (UpToStop(queue, request.stop) if request.stop else queue), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        request = self._bound(inputs, gen_config)
        turn: Any = _Turn(model, processor, request, self, streaming=False)
        text, length, ids = await super().generate_non_streaming(turn, processor, inputs, gen_config, request_id)
        return until_stop(text, request.stop), length, ids

    def submit(self, fn: Callable, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self._line.join(current(), call)
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

        self._line.join(request, call)
        request.on_leave(lambda: settle(future.set_exception, _left()))
        return future


class _Line:
    """Calls that wait for one thread, in order; those of a client that goes leave the line.

    One thread, since compiled CUDA graphs belong to the thread that made them.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[InFlight, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="polymoe generation").start()

    def join(self, request: InFlight, call: Callable[[], None]) -> None:
        """Wait in line for the thread."""
        with self._changed:
            self._calls.append((request, call))
            self._changed.notify()
        request.on_leave(lambda: self._drop(request))

    def _drop(self, request: InFlight) -> None:
        with self._changed:
            self._calls = deque(waiting for waiting in self._calls if waiting[0] is not request)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                _, call = self._calls.popleft()
            try:
                call()
            except RuntimeError as error:  # the event loop is closed: the server has ended before its answer
                log.debug("an answer came too late: %s", error)
            del _, call  # which hold the prompt, and the answer


class _Turn:
    """A request's turn at the model, called as the model is."""

    def __init__(self, model: Any, processor: Any, request: InFlight, manager: _Sequential, *, streaming: bool) -> None:
        self._model, self._processor, self._request, self._manager = model, processor, request, manager
        self._streaming = streaming

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **kwargs: Any) -> Any:
        """As the model's; ends early when the client goes, the server stops or a stop string is there."""
        request, metrics, stopping = self._request, self._manager.metrics, self._manager.stopping
        if stopping.is_set():
            raise self._said(HTTPException(503, detail=error_body("the server is stopping", kind="server_error")))
        metrics.started(request)
        if request.seed is not None:
            torch.manual_seed(request.seed)
        watch = _Watch(request, metrics, stopping, self._processor)
        try:
            return self._model.generate(**kwargs, stopping_criteria=StoppingCriteriaList([watch]))
        except Exception as error:
            if request.gone.is_set():  # this is how Transformers ends the stream of a client that went away
                raise
            log.exception("generation failed")
            detail = error_body(f"generation failed: {error}", kind="server_error")
            raise self._said(HTTPException(500, detail=detail)) from error
        finally:
            metrics.ended(request)

    def _said(self, error: HTTPException) -> Exception:
        """The error; for a stream as Transformers puts it between quotation marks."""
        if not self._streaming:
            return error
        detail: Any = error.detail
        return RuntimeError(json.dumps(detail["error"]["message"])[1:-1])


class _Watch(StoppingCriteria):
    """Looks at each token: counts it, and ends the generation at a stop string, or if nobody waits for more."""

    def __init__(self, request: InFlight, metrics: ServerMetrics, stopping: threading.Event, processor: Any) -> None:
        self._request, self._metrics, self._stopping = request, metrics, stopping
        self._tokenizer = getattr(processor, "tokenizer", processor)._tokenizer if request.stop else None
        self._stream = DecodeStream(skip_special_tokens=True)
        self._longest = max(map(len, request.stop), default=0)
        self._tail = ""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self._metrics.generated(self._request)
        stop = self._request.gone.is_set() or self._stopping.is_set() or self._says_stop(input_ids)
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)

    def _says_stop(self, input_ids: Tensor) -> bool:
        if self._tokenizer is None:
            return False
        self._tail += self._stream.step(self._tokenizer, int(input_ids[0, -1])) or ""
        found = any(stop in self._tail for stop in self._request.stop)
        self._tail = self._tail[-self._longest :]
        return found


class _Batched(_Bounded, CBGenerateManager):
    """Transformers' continuous batching: requests share forward passes."""

    def __init__(self, limits: Limits, metrics: ServerMetrics, how: Batching) -> None:
        if how.paged:
            config = paged_attention.batching(graphs=how.graphs, cache_memory=how.cache_memory)
        else:
            config = ContinuousBatchingConfig(use_cuda_graph=False, max_memory_percent=how.cache_memory)
        super().__init__(cb_config=config)
        self.limits, self.metrics, self.how = limits, metrics, how

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Transformers' own at the first request, with the attention and the graphs that were chosen."""
        if self._cb is not None:
            return
        manager = model.init_continuous_batching(
            generation_config=gen_config, continuous_batching_config=self._cb_config
        )
        if self.how.paged:
            paged_attention.use(model)
        if self.how.graphs:
            paged_attention.capture_small_steps(manager)
        manager.start()
        self._cb = manager

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        request = self._bound(inputs, gen_config)
        queue, streamer = super().generate_streaming(
            model, processor, inputs, gen_config, uuid.uuid4().hex, response_parser=response_parser
        )
        self.metrics.started(request)
        return Counted(queue, streamer, request, self.metrics), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        request, own_id = self._bound(inputs, gen_config), uuid.uuid4().hex
        answer = asyncio.ensure_future(super().generate_non_streaming(model, processor, inputs, gen_config, own_id))

        def cancel() -> None:
            if self._cb is not None:
                self._cb.cancel_request(own_id)
            answer.cancel()

        request.on_leave(cancel)
        self.metrics.started(request)
        try:
            text, length, ids = await answer
        except asyncio.CancelledError:
            raise (_left() if request.gone.is_set() else asyncio.CancelledError()) from None
        self.metrics.generated(request, len(ids))
        return text, length, ids


def _left() -> HTTPException:
    return HTTPException(499, detail=error_body("the client went away"))
