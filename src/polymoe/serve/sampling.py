"""How the tokens of answers are chosen, in the same way whether or not requests share forward passes.

Each answer has a :class:`TokenSampler`, and :func:`choose_tokens` takes the logits of a step and the samplers of its
answers. Changes of logits come first, in the order bias, minimum length, penalties. Then the temperature divides them,
and ``top_k``, ``top_p`` and ``min_p`` keep some of the tokens, each of those that the one before it has kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polymoe.serve.settings import GenerationSettings

_DEFAULT_MAX_TOKENS = 1024
_LOWEST = -9999.0  # of log probabilities, since JSON has no infinity


def with_defaults(
    settings: GenerationSettings, model_config: Any, temperature: float | None = None
) -> GenerationSettings:
    """Settings in which nothing but ``seed`` and ``logprobs`` is None.

    Args:
        settings: of the request.
        model_config: the checkpoint's generation config. What it does not say has no effect.
        temperature: of requests that name none; None is the checkpoint's own.
    """
    if temperature is None:
        temperature = (model_config.temperature or 1.0) if model_config.do_sample else 0.0
    own = {
        "max_tokens": max(model_config.max_new_tokens or 0, _DEFAULT_MAX_TOKENS),
        "temperature": temperature,
        "top_k": model_config.top_k or 0,
        "top_p": model_config.top_p or 1.0,
        "min_p": model_config.min_p or 0.0,
        "repetition_penalty": model_config.repetition_penalty or 1.0,
    }
    return replace(settings, **{name: value for name, value in own.items() if getattr(settings, name) is None})


def greedy_config(model_config: Any) -> Any:
    """Transformers' generation config without what samplers do. What else the checkpoint's own config says stays."""
    config = copy.deepcopy(model_config)
    config.do_sample = False
    config.temperature = config.top_p = config.repetition_penalty = 1.0
    config.top_k = config.min_p = None
    return config


def end_tokens(model_config: Any) -> tuple[int, ...]:
    """Tokens that end answers by the checkpoint's generation config."""
    ends = model_config.eos_token_id
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of one step's tokens, on their way from the device.

    Attributes:
        values: float32 ``[R, 1 + K]``: of the chosen tokens, and of the K most probable ones.
        ids: int64 ``[R, 1 + K]``: which tokens these are.
        ready: set on the device once both have arrived; None on a CPU.
    """

    values: Tensor
    ids: Tensor
    ready: Any = None

    def row(self, row: int, alternatives: int) -> list[tuple[int, float]]:
        """Ids and log probabilities of the chosen token, and of so many most probable ones."""
        if self.ready is not None:
            self.ready.synchronize()
        count = 1 + alternatives
        values = self.values[row, :count].clamp(min=_LOWEST).tolist()
        return list(zip(self.ids[row, :count].tolist(), values, strict=True))


class TokenSampler:
    """Chooses the tokens of one answer, in one thread.

    Args:
        settings: as :func:`with_defaults` returns them.
        prompt: token ids of the prompt.
        ends: tokens that end the answer, which it does not get before its minimum length.
        number: of the answer among those to its request, each of which has another seed.

    Attributes:
        count: number of tokens chosen so far.
        logprobs: where the log probabilities of each token are, if the settings ask for them: a step and a row of it.
    """

    def __init__(
        self, settings: GenerationSettings, prompt: Sequence[int], ends: Sequence[int] = (), number: int = 0
    ) -> None:
        self.settings, self.count = settings, 0
        self.logprobs: list[tuple[Logprobs, int]] = []
        self._prompt, self._ends, self._number = prompt, list(ends), number
        self._penalized = bool(settings.frequency_penalty or settings.presence_penalty)
        self._repetition = settings.repetition_penalty not in (None, 1.0)
        self._counts_V: Tensor | None = None
        self._in_prompt_V: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Whether the next token is the most probable one by the model's logits."""
        s = self.settings
        changed = s.logit_bias or self._penalized or self._repetition or self.count < s.min_tokens
        return not (changed or s.temperature)

    def restart(self, answer: Sequence[int]) -> None:
        """Forget all tokens but these, which the answer begins with."""
        self.count = len(answer)
        del self.logprobs[self.count :]
        if self._counts_V is not None:
            self._counts_V.zero_()
            self._add(_sent(answer, torch.long, self._counts_V))

    def change(self, logits_V: Tensor) -> None:
        """Change the float32 logits of the next token in place."""
        settings = self.settings
        if settings.logit_bias:
            if self._bias is None:
                ids, values = zip(*settings.logit_bias.items(), strict=True)
                self._bias = _sent(ids, torch.long, logits_V), _sent(values, torch.float32, logits_V)
            logits_V.index_add_(0, *self._bias)
        if self.count < settings.min_tokens and self._ends:
            logits_V.index_fill_(0, _sent(self._ends, torch.long, logits_V), -torch.inf)
        if not (self._penalized or self._repetition):
            return
        if self._counts_V is None or self._in_prompt_V is None:
            self._counts_V = torch.zeros_like(logits_V)
            self._in_prompt_V = torch.zeros_like(logits_V, dtype=torch.bool)
            self._in_prompt_V.index_fill_(0, _sent(self._prompt, torch.long, logits_V), True)
        if self._repetition:
            factor = settings.repetition_penalty or 1.0
            seen_V = (self._counts_V > 0) | self._in_prompt_V
            penalized_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
            logits_V.copy_(torch.where(seen_V, penalized_V, logits_V))
        logits_V.sub_(self._counts_V * settings.frequency_penalty)
        logits_V.sub_((self._counts_V > 0) * settings.presence_penalty)

    def seeded(self, noise_V: Tensor) -> None:
        """Replace exponential noise if there is a seed: by that of the seed and the token's place, so that it does not
        depend on what else the device computes."""
        if self.settings.seed is not None:
            generator = torch.Generator(noise_V.device)
            generator.manual_seed((self.settings.seed * 1_000_003 + self._number * 10_007 + self.count) % 2**63)
            noise_V.exponential_(generator=generator)

    def chosen(self, ids_R: Tensor, row: int) -> None:
        """Record the next token, a row of a step's int64 ids, which may still be computed on the device."""
        self.count += 1
        if self._counts_V is not None:
            self._add(ids_R[row : row + 1])

    def _add(self, ids_N: Tensor) -> None:
        assert self._counts_V is not None
        self._counts_V.index_add_(0, ids_N, torch.ones_like(ids_N, dtype=self._counts_V.dtype))


@torch.no_grad()
def choose_tokens(logits_RV: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """The next token of each answer, int64 ``[R]``, from float32 logits, which are changed in place. Nothing waits for
    the device."""
    reported = [row for row, sampler in enumerate(samplers) if sampler.settings.logprobs is not None]
    logprobs_LV = _rows(logits_RV, reported).log_softmax(-1) if reported else None
    for row, sampler in enumerate(samplers):
        if not sampler.plain:
            sampler.change(logits_RV[row])
    ids_R = logits_RV.argmax(-1)
    hot = [row for row, sampler in enumerate(samplers) if sampler.settings.temperature]
    if hot:
        found_S = _sampled(_rows(logits_RV, hot), [samplers[row] for row in hot])
        ids_R.index_copy_(0, _sent(hot, torch.long, ids_R), found_S)
    if logprobs_LV is not None:
        _report(logprobs_LV, _rows(ids_R, reported), [samplers[row] for row in reported])
    for row, sampler in enumerate(samplers):
        sampler.chosen(ids_R, row)
    return ids_R


def _sent(values: Sequence[float], dtype: torch.dtype, to: Tensor) -> Tensor:
    """Values on the device of ``to``. A copy from memory that is not pinned would wait for all that the device does."""
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=to.is_cuda).to(to.device, non_blocking=True)


def _rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    return x if len(rows) == len(x) else x.index_select(0, _sent(rows, torch.long, x))


def _sampled(logits_SV: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    def column(name: str) -> Tensor:
        return _sent([float(getattr(s.settings, name)) for s in samplers], torch.float32, logits_SV)[:, None]

    probabilities_SV = (logits_SV / column("temperature")).softmax(-1)
    order_SV = None
    if any(s.settings.top_k or s.settings.top_p != 1 for s in samplers):
        probabilities_SV, order_SV = probabilities_SV.sort(-1, descending=True)
        if any(s.settings.top_k for s in samplers):
            k_S1 = column("top_k")
            rank_V = torch.arange(probabilities_SV.shape[1], device=logits_SV.device)
            probabilities_SV = probabilities_SV.masked_fill((k_S1 > 0) & (rank_V >= k_S1), 0)
            probabilities_SV = probabilities_SV / probabilities_SV.sum(-1, keepdim=True)
        before_SV = probabilities_SV.cumsum(-1) - probabilities_SV
        # A sum of all probabilities may round to more than 1, so 1 keeps everything.
        p_S1 = column("top_p")
        probabilities_SV = probabilities_SV.masked_fill((p_S1 < 1) & (before_SV >= p_S1), 0)
    least_S1 = column("min_p") * probabilities_SV.amax(-1, keepdim=True)
    probabilities_SV = probabilities_SV.masked_fill(probabilities_SV < least_S1, 0)
    noise_SV = torch.empty_like(probabilities_SV).exponential_()
    for row, sampler in enumerate(samplers):
        sampler.seeded(noise_SV[row])
    # The largest of probabilities over exponential noise is each token with its probability. Noise may be 0.
    place_S1 = (probabilities_SV / noise_SV.clamp_(min=1e-20)).argmax(-1, keepdim=True)
    return (place_S1 if order_SV is None else order_SV.gather(1, place_S1)).squeeze(1)


def _report(logprobs_LV: Tensor, ids_L: Tensor, samplers: Sequence[TokenSampler]) -> None:
    most = max(sampler.settings.logprobs or 0 for sampler in samplers)
    top = logprobs_LV.topk(min(most, logprobs_LV.shape[1]), dim=-1)
    chosen_L1 = ids_L[:, None]
    values = torch.cat([logprobs_LV.gather(1, chosen_L1), top.values], 1)
    ids = torch.cat([chosen_L1, top.indices], 1)
    found = Logprobs(*_to_host(values, ids))
    for row, sampler in enumerate(samplers):
        sampler.logprobs.append((found, row))


def _to_host(*tensors: Tensor) -> tuple[Any, ...]:
    """Copies in host memory, and what says when they are there."""
    if tensors[0].device.type != "cuda":
        return *tensors, None
    hosts = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) for x in tensors]
    copies = [host.copy_(x, non_blocking=True) for host, x in zip(hosts, tensors, strict=True)]
    return *copies, torch.cuda.current_stream().record_event()
