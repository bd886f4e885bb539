"""Experts on their way to a GPU."""

from __future__ import annotations

import torch

from polymoe.layouts.staging import uploaded
from support.problems import random_experts


def test_what_arrives_on_a_gpu_is_what_was_sent() -> None:
    weights = random_experts("nvfp4", experts=9, hidden=1024, intermediate=512, bias=True)
    arrived = list(uploaded(weights, torch.device("cuda")))
    for got, expected in zip(arrived, weights, strict=True):
        assert got.up.device.type == "cuda"
        for name, matrix in expected.projections.items():
            for part, tensor in matrix.parts().items():
                other = got.projections[name].parts()[part].cpu()
                assert torch.equal(other.view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
