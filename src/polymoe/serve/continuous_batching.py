"""Requests that share forward passes: Transformers' continuous batching, with polymoe's attention and small graphs."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import CBGenerateManager

from polymoe.engines.transformers import paged_attention
from polymoe.engines.transformers.decode_graph import require_capturable
from polymoe.errors import UnsupportedProblem
from polymoe.serve.errors import client_left
from polymoe.serve.limits import Limits, begin_generation
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.sampling import generation_config
from polymoe.serve.settings import GenerationSettings
from polymoe.serve.streams import CountedQueue

__all__ = ["Batching", "BatchingManager"]

log = logging.getLogger("polymoe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How requests share forward passes.

    Attributes:
        paged: use :mod:`polymoe.engines.transformers.paged_attention` instead of Transformers' attention.
        graphs: replay small steps from CUDA graphs; needs ``paged``.
        cache_memory: share of the GPU's free memory for keys and values; None is Transformers' default.
        temperature: of all requests; None is the checkpoint's own.
    """

    paged: bool = False
    graphs: bool = False
    cache_memory: float | None = None
    temperature: float | None = None

    @classmethod
    def of(
        cls, model: Any, *, graphs: bool | None, cache_memory: float | None, temperature: float | None = None
    ) -> Batching:
        """The best that ``model`` allows; ``graphs`` None means wherever possible.

        Raises:
            UnsupportedProblem: if ``graphs`` is True and the model's attention or experts cannot be captured.
        """
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
        return cls(paged=paged, graphs=graphs, cache_memory=cache_memory, temperature=temperature)


class BatchingManager(CBGenerateManager):
    """The manager that Transformers' handlers call where requests share forward passes.

    Managers tell requests apart by an id from a header. Two clients may send the same one, so it is replaced.

    Args:
        limits: of every request.
        metrics: counts tokens and times.
        batching: how requests share forward passes.
    """

    def __init__(self, limits: Limits, metrics: ServerMetrics, batching: Batching) -> None:
        if batching.paged:
            config = paged_attention.batching_config(graphs=batching.graphs, cache_memory=batching.cache_memory)
        else:
            config = ContinuousBatchingConfig(use_cuda_graph=False, max_memory_percent=batching.cache_memory)
        super().__init__(cb_config=config)
        self.limits, self.metrics, self.batching = limits, metrics, batching

    def config(self, model: Any) -> Any:
        """Transformers' generation config of all requests, which have one set of sampling settings."""
        settings = GenerationSettings(temperature=self.batching.temperature)
        return generation_config(model.generation_config, settings, shared=True)

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Start continuous batching at the first request, with the chosen attention and graphs."""
        if self._cb is not None:
            return
        manager = model.init_continuous_batching(
            generation_config=gen_config, continuous_batching_config=self._cb_config
        )
        if self.batching.paged:
            paged_attention.use(model)
        if self.batching.graphs:
            paged_attention.capture_small_steps(manager)
        manager.start()
        self._cb = manager

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        request = begin_generation(inputs, gen_config, self.limits)
        queue, streamer = super().generate_streaming(
            model, processor, inputs, gen_config, uuid.uuid4().hex, response_parser=response_parser
        )
        self.metrics.started(request)
        return CountedQueue(queue, streamer, request, self.metrics), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        request, own_id = begin_generation(inputs, gen_config, self.limits), uuid.uuid4().hex
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
            raise (client_left() if request.gone.is_set() else asyncio.CancelledError()) from None
        self.metrics.generated(request, len(ids))
        return text, length, ids
