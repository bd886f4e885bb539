"""One generation after the other: what runs requests unless they share forward passes.

Transformers' ``generate`` computes an answer in a thread. It chooses the most probable token of logits in which a
:class:`~polymoe.serve.sampling.TokenSampler` has left only its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from polymoe.serve.choices import AnswerChoice
from polymoe.serve.errors import cut_off, failed, unavailable
from polymoe.serve.in_flight import InFlight, Threads
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.sampling import TokenSampler, choose_tokens, greedy_config

log = logging.getLogger("polymoe")


class Sequential:
    """Runs one generation at a time, in the order of the requests.

    Args:
        model: as :func:`polymoe.engines.transformers.load` returns it.
        metrics: counts tokens and times.
        stopping: once set, the running generation ends at its next token, and those that wait are refused.
    """

    def __init__(self, model: Any, metrics: ServerMetrics, stopping: threading.Event) -> None:
        self._model, self._metrics, self._stopping = model, metrics, stopping
        # One thread, because compiled CUDA graphs belong to the thread that captured them.
        self.thread = Threads("polymoe generation")

    def start(self, choices: Sequence[AnswerChoice], request: InFlight) -> None:
        """Begin to generate answers. Their parts arrive in the current event loop."""
        loop = asyncio.get_running_loop()
        for choice in choices:
            self.thread.submit(self._generate, choice, request, loop)

    def alive(self) -> bool:
        """Whether requests can be answered."""
        return True

    def close(self, timeout_s: float) -> bool:
        """Wait until no generation runs, at most ``timeout_s`` seconds; whether that is so then."""
        # The thread runs calls in order: when this one has run, those before it have ended.
        return not wait([self.thread.submit(lambda: None)], timeout_s).not_done

    def _generate(self, choice: AnswerChoice, request: InFlight, loop: asyncio.AbstractEventLoop) -> None:
        def tell(fn: Callable, *args: Any) -> None:
            loop.call_soon_threadsafe(fn, *args)

        if self._stopping.is_set():
            tell(choice.fail, unavailable("the server is stopping"))
            return
        if choice.ended or request.left is not None:
            return
        self._metrics.started(request)
        config = greedy_config(self._model.generation_config)
        config.max_new_tokens = choice.max_tokens
        # No token is -1; Transformers would replace None by the model's default.
        config.eos_token_id = list(choice.ends) or -1

        def over() -> bool:
            return choice.ended or request.left is not None or self._stopping.is_set()

        ids = torch.tensor([choice.prompt], device=self._model.device)
        try:
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Sampled(choice.sampler)]),
                stopping_criteria=StoppingCriteriaList([_EachToken(lambda token: tell(choice.feed, token), over)]),
            )
        except BaseException as error:  # the tokenizers package has errors that are no Exception
            log.exception("generation failed")
            tell(choice.fail, failed(error))
        else:
            tell(choice.fail, cut_off())  # without effect on an answer that has all its tokens


class _Sampled(LogitsProcessor):
    """Leaves the token that the sampler chooses."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        # A copy also of float32, in which the sampler changes what it gets.
        token = choose_tokens(scores.to(torch.float32, copy=True), [self._sampler])
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0)


class _EachToken(StoppingCriteria):
    """Passes each token on; ends the generation if nobody waits for more."""

    def __init__(self, on_token: Callable[[int], None], over: Callable[[], bool]) -> None:
        self._on_token, self._over = on_token, over

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self._on_token(int(input_ids[0, -1]))
        return torch.full((input_ids.shape[0],), self._over(), dtype=torch.bool, device=input_ids.device)
