"""Dummy weights of an engine: plausible numbers, as unusual scales would choose another layout."""

from __future__ import annotations

import torch

from polymoe.engines.serving.sources import StackedExperts

_E8M0 = 120  # 2**-7
_SCALE = 2.0**-7


def fill(experts: StackedExperts) -> None:
    """Fill the tensors of ``experts`` in place: random codes, one scale for all."""
    for name in experts.names:
        tensor = experts.tensors[name]
        if "bias" in name:
            tensor.zero_()
        elif "zero" in name:
            tensor.fill_(0x77777777)  # AWQ's 7; GPTQ's 8, stored minus one
        elif "scale" in name:
            tensor.fill_(_E8M0 if tensor.dtype == torch.uint8 else _SCALE)
        elif tensor.dtype.is_floating_point:
            for expert in tensor:
                expert.copy_(torch.randn(expert.shape, device=expert.device))
        else:
            tensor.view(torch.uint8).random_(0, 256)
