"""Requests that share forward passes: Transformers' continuous batching, with polymoe's attention, sampling and small
graphs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig

from polymoe.engines.transformers import paged_attention
from polymoe.engines.transformers.decode_graph import require_capturable
from polymoe.errors import UnsupportedProblem
from polymoe.serve.choices import AnswerChoice
from polymoe.serve.errors import cut_off, failed, unavailable
from polymoe.serve.in_flight import InFlight
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.sampling import greedy_config
from polymoe.serve.sequential import Sequential
from polymoe.serve.shared_sampling import SharedSampling, require_hooks

log = logging.getLogger("polymoe")

_START_S = 600.0  # for the cache and the first forward pass
_LATE_S = 30.0  # after this, nothing arrives any more for a request that was cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How requests share forward passes.

    Attributes:
        paged: use :mod:`polymoe.engines.transformers.paged_attention` instead of Transformers' attention.
        graphs: replay small steps from CUDA graphs; needs ``paged``.
        cache_memory: share of the GPU's free memory for keys and values; None is Transformers' default.
    """

    paged: bool = False
    graphs: bool = False
    cache_memory: float | None = None

    @classmethod
    def of(cls, model: Any, *, graphs: bool | None, cache_memory: float | None) -> Batching:
        """The best that ``model`` allows; ``graphs`` None means wherever possible.

        Raises:
            UnsupportedProblem: if the device is a CPU, where Transformers' continuous batching does not answer, if its
                private parts are not as expected, or if ``graphs`` is True and the model's attention or experts cannot
                be captured.
        """
        _require_cuda(model)
        require_hooks()
        paged = paged_attention.runs_on(model)
        if graphs and not paged:
            raise UnsupportedProblem(
                "CUDA graphs of continuous batching",
                expected="16 bit, a GPU since SM80, attention without a cap",
                got=type(model).__name__,
                hint="serve without them",
            )
        if graphs or (graphs is None and paged):
            try:
                require_capturable(model)
            except UnsupportedProblem as error:
                if graphs:
                    raise
                log.info("no CUDA graphs: %s", error)
                graphs = False
        graphs = paged if graphs is None else graphs
        return cls(paged=paged, graphs=graphs, cache_memory=cache_memory)


def _require_cuda(model: Any) -> None:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or model.device.type != "cuda":
        raise UnsupportedProblem(
            "continuous batching",
            expected="one CUDA device",
            got=", ".join(devices),
            hint="serve without it: requests then run one after the other",
        )


class ContinuousBatching:
    """Runs requests together. It starts at once, and answers one token to itself.

    Args:
        model: as :func:`polymoe.engines.transformers.load` returns it.
        metrics: counts tokens and times.
        stopping: once set, generations end at their next token.
        batching: how requests share forward passes.

    Raises:
        UnsupportedProblem: if the model cannot run so.
    """

    def __init__(self, model: Any, metrics: ServerMetrics, stopping: threading.Event, batching: Batching) -> None:
        self._metrics, self._stopping, self.batching = metrics, stopping, batching
        self._sampling = SharedSampling()
        if batching.paged:
            config = paged_attention.batching_config(graphs=batching.graphs, cache_memory=batching.cache_memory)
        else:
            config = ContinuousBatchingConfig(use_cuda_graph=False, max_memory_percent=batching.cache_memory)
        attention = model.config._attn_implementation
        self._cb = model.init_continuous_batching(
            generation_config=greedy_config(model.generation_config), continuous_batching_config=config
        )
        if batching.paged:
            paged_attention.use(model)
        if batching.graphs:
            paged_attention.capture_small_steps(self._cb)
        self._sampling.use_in(self._cb)
        self._cb.start()
        error = self._first_answer()
        if error is not None:
            self._cb.stop(block=True, timeout=2)
            model.set_attn_implementation(attention)
            raise UnsupportedProblem(
                "continuous batching", expected="an answer of one token", got=error, hint="serve without it"
            )

    def _first_answer(self) -> str | None:
        """What went wrong with the first token; it needs the cache and all kernels."""
        self._cb.add_request([0], request_id="first", max_new_tokens=1, eos_token_id=-1)
        answer, end = None, time.monotonic() + _START_S
        while answer is None and self.alive() and time.monotonic() < end:
            answer = self._cb.get_result("first", timeout=0.2)
        fatal = self._cb.background_thread_status.fatal_error
        if answer is None or answer.error is not None:
            return str(fatal or (answer and answer.error) or f"none in {_START_S:.0f} s")
        return None

    @property
    def cache_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return self._cb.batch_processor.cache.cache_tensor.nbytes

    @property
    def cache_tokens(self) -> int:
        """About how many tokens of all requests together have keys and values in the cache."""
        return self._cb.batch_processor.cache.num_blocks * self._cb.continuous_batching_config.page_size

    def start(self, choices: Sequence[AnswerChoice], request: InFlight) -> None:
        """Begin to generate answers. Their parts arrive in the current event loop.

        Raises:
            HTTPException: 503 if the thread that generates has died.
        """
        if not self.alive():
            raise unavailable(f"continuous batching has stopped: {self._cb.background_thread_status.fatal_error}")
        self._metrics.started(request)
        for choice in choices:
            self._start(choice, request)

    def _start(self, choice: AnswerChoice, request: InFlight) -> None:
        # Requests could choose equal ids.
        own_id, loop = uuid.uuid4().hex, asyncio.get_running_loop()
        self._sampling.samplers[own_id] = choice.sampler, len(choice.prompt)

        def forget() -> None:
            self._sampling.samplers.pop(own_id, None)

        def cancel() -> None:
            if self._sampling.samplers.get(own_id) is not None:
                forget()
                self._cb.cancel_request(own_id)
                # Without the handler, what is still on its way would be kept.
                loop.call_later(_LATE_S, self._cb.output_router.result_handlers.pop, own_id, None)

        def on_output(output: Any) -> None:
            for token in output.generated_tokens[choice.tokens :]:
                choice.feed(token)
            if output.error is not None:
                forget()
                choice.fail(failed(output.error) if self.alive() else unavailable(output.error))
            elif output.is_finished():
                forget()
                choice.fail(cut_off())
            elif choice.ended or self._stopping.is_set():
                cancel()
                choice.fail(cut_off())

        self._cb.register_result_handler(own_id, on_output)
        self._cb.add_request(
            choice.prompt,
            request_id=own_id,
            streaming=True,
            max_new_tokens=choice.max_tokens,
            eos_token_id=list(choice.ends) or -1,
        )
        request.on_leave(lambda _: cancel())

    def alive(self) -> bool:
        """Whether requests can be answered."""
        return self._cb.background_thread_status.fatal_error is None

    def close(self, timeout_s: float) -> bool:
        """Wait until no generation runs, at most ``timeout_s`` seconds; whether that is so then."""
        self._cb.stop(block=True, timeout=max(timeout_s, 2.0))
        return not self._cb.is_running()


def choose_generation(
    model: Any,
    metrics: ServerMetrics,
    stopping: threading.Event,
    *,
    shared: bool | None = None,
    graphs: bool | None = None,
    cache_memory: float | None = None,
) -> tuple[ContinuousBatching | Sequential, str]:
    """What runs the requests of one model, and why they do not share forward passes; "" if they do.

    Args:
        model: as :func:`polymoe.engines.transformers.load` returns it.
        metrics: counts tokens and times.
        stopping: once set, generations end at their next token, and those that wait are refused.
        shared: whether requests share forward passes; None for wherever that is faster.
        graphs, cache_memory: of shared forward passes, as in :class:`Batching`.

    Raises:
        UnsupportedProblem: if requests are to share forward passes, or steps to be captured, and the model or the
            device does not allow it.
    """
    # An option that only shared forward passes have asks for them.
    wanted, why = shared or graphs or cache_memory is not None, "not asked for"
    if shared is not False:
        try:
            batching = Batching.of(model, graphs=graphs, cache_memory=cache_memory)
            if wanted or batching.paged:
                return ContinuousBatching(model, metrics, stopping, batching), ""
            why = "the model needs 16 bit, a GPU since SM80 and attention without a cap"
        except UnsupportedProblem as error:
            if wanted:
                raise
            why = f"{error.where} needs {error.expected}, got {error.got}"
            if model.device.type == "cuda":
                log.warning("requests run one after the other: %s", error)
    return Sequential(model, metrics, stopping), why
