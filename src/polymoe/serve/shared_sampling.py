"""Sampling of each request's own in Transformers' continuous batching, which has one set of settings for all.

Its runner computes logits and chooses tokens in one function, which a CUDA graph may replay. Here the graph ends with
the logits, in a buffer, and :func:`~polymoe.serve.sampling.choose_tokens` writes the tokens behind it, on the same
stream.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from polymoe.engines.hooks import Hook, differences
from polymoe.engines.transformers.contract import unsupported
from polymoe.engines.transformers.paged_attention import CAPTURED
from polymoe.serve.sampling import TokenSampler, choose_tokens
from polymoe.serve.settings import GenerationSettings

_WITHIN = "transformers.generation.continuous_batching"
HOOKS = (
    Hook(f"{_WITHIN}.model_runner", "ModelRunner._get_forward_fn(self, use_block_table)"),
    Hook(f"{_WITHIN}.model_runner", "ModelRunner._sample(self, scores, output_ids)"),
    Hook(f"{_WITHIN}.model_runner", "ModelRunner.compute_batch(self, model, batch_data)"),
    Hook(f"{_WITHIN}.input_outputs", "ContinuousBatchingIOs.get_cb_kwargs(self)"),
    Hook(f"{_WITHIN}.input_outputs", "ContinuousBatchingIOs.prepare_batch_tensors(self, requests_in_batch, ...)"),
    Hook(f"{_WITHIN}.input_outputs", "ContinuousBatchingAsyncIOs.prepare_batch_tensors(self, requests_in_batch, ...)"),
)
"""What this module relies on. Older versions of Transformers do not have it."""


def require_hooks() -> None:
    """Check the installed version of Transformers.

    Raises:
        UnsupportedProblem: naming the first part that is not as expected.
    """
    for part, got in differences(HOOKS):
        raise unsupported(str(part), got)


class SharedSampling:
    """The samplers of requests that share forward passes.

    Attributes:
        samplers: by the id of the request in Transformers' scheduler, with the length of its prompt. The thread of the
            generation reads it; another one may add and remove entries.
    """

    def __init__(self) -> None:
        self.samplers: dict[str, tuple[TokenSampler, int]] = {}
        self._batch: list[TokenSampler] = []
        self._logits: Tensor | None = None  # of this step, unless a graph computes them
        self._buffer: Tensor | None = None  # of steps that graphs compute

    def use_in(self, manager: Any) -> None:
        """Choose the tokens of a manager of continuous batching, which must not have started."""
        create = manager._create_batch_processor

        def create_batch_processor() -> Any:
            processor = create()
            self._replace(processor.model_runner, processor.inputs_and_outputs)
            return processor

        manager._create_batch_processor = create_batch_processor

    def _replace(self, runner: Any, io: Any) -> None:
        prepare, compute = io.prepare_batch_tensors, runner.compute_batch

        def prepare_batch_tensors(requests_in_batch: Any, *args: Any, **kwargs: Any) -> None:
            prepare(requests_in_batch, *args, **kwargs)
            self._batch = [self._sampler(future.state) for future in requests_in_batch if future.has_new_token]

        def sample(scores: Tensor, output_ids: Tensor) -> None:
            _, graph = runner._get_forward_fn(use_block_table=io.use_block_table)
            if not graph:
                self._logits = scores[0]
                return
            if self._buffer is None:  # not while a graph is captured: every step runs once before
                self._buffer = scores.new_empty(CAPTURED, scores.shape[2])
            self._buffer[: scores.shape[1]].copy_(scores[0])

        def compute_batch(model: Any, batch_data: Any) -> None:
            self._logits = None
            compute(model, batch_data)
            logits = self._buffer if self._logits is None else self._logits
            *_, output_ids = io.get_cb_kwargs()
            if not self._batch or logits is None:
                return
            stream = io.compute_stream
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                count = len(self._batch)
                output_ids[0, :count].copy_(choose_tokens(logits[:count], self._batch))

        io.prepare_batch_tensors = prepare_batch_tensors
        runner._sample, runner.compute_batch = sample, compute_batch

    def _sampler(self, state: Any) -> TokenSampler:
        """The sampler of a request that gets its next token in this step."""
        found = self.samplers.get(state.request_id)
        if found is None:  # it has ended meanwhile, and nobody reads the token
            return TokenSampler(GenerationSettings(), [])
        sampler, prompt = found
        place = state.position_offset - prompt
        # The tokens of a step that ran ahead are dropped if the request has lost its place in the cache.
        if place != sampler.count:
            sampler.restart([*state.initial_tokens, *state.generated_tokens][prompt : prompt + place])
        return sampler
