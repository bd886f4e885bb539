"""Prompts and the tokens that follow them, decoded step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.engines.transformers.decode_graph import Decoder

LENGTH, STEPS = 10, 6  # the sliding window is 8


def prompts() -> Tensor:
    return torch.randint(3, 13, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def given_tokens() -> Tensor:
    return torch.randint(3, 13, (STEPS, 2, 1), generator=torch.Generator().manual_seed(1))


def step_by_step(decoder: Decoder, prompts_BT: Tensor, given_NB1: Tensor) -> Tensor:
    return torch.stack([decoder.prefill(prompts_BT).clone(), *(decoder.step(token).clone() for token in given_NB1)])
