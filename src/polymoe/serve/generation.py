"""Generation: what Transformers' server asks for the manager of a request, for one model."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

from transformers.cli.serving.utils import GenerationState

from polymoe.serve.continuous_batching import Batching, BatchingManager
from polymoe.serve.limits import Limits
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.sequential import SequentialManager

__all__ = ["Generation"]


class Generation(GenerationState):
    """Transformers' generation state, for one model.

    Args:
        name: the model's name.
        limits: of every request.
        metrics: counts tokens and times.
        batching: how requests share forward passes; None lets them run one after the other.

    Attributes:
        stopping: once set, generations end at their next token, and those that wait are refused.
        sequential: the manager of requests that run one after the other.
    """

    def __init__(self, name: str, limits: Limits, metrics: ServerMetrics, *, batching: Batching | None) -> None:
        super().__init__(continuous_batching=batching is not None)
        self.limits = limits
        self.stopping = threading.Event()
        self.sequential = SequentialManager(limits, metrics, self.stopping)
        if batching is not None:
            self._cb_manager, self._cb_model_id = BatchingManager(limits, metrics, batching), name

    @property
    def continuous_batching(self) -> bool:
        """Whether requests share forward passes."""
        return self._continuous_batching

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return super().get_manager(model_id, use_cb=True) if use_cb else self.sequential

    def close(self, timeout_s: float) -> bool:
        """Wait until no generation runs, at most ``timeout_s`` seconds; whether that is so then."""
        self.shutdown()
        # The thread runs calls in order: when this one has run, those before it have ended.
        return not wait([self.sequential.submit(lambda: None)], timeout_s).not_done
