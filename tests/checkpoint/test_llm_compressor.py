"""A file that llm-compressor wrote: stacked experts of GraniteMoE in INT4, each under a name of its own.

Made by llm-compressor 0.14.0.1 with compressed-tensors 0.20 and Transformers 5.23, on a CPU, of a model of one layer
whose parameters are those of :func:`parameter`::

    oneshot(model=model, recipe=QuantizationModifier(
        targets="Linear", scheme="W4A16", ignore=["lm_head", "re:.*gate$", "re:.*router.*", "re:.*self_attn.*"]))
    model.save_pretrained(path, save_compressed=True)
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polymoe.checkpoint import Checkpoint
from polymoe.problem.numerics import relative_error

pytest.importorskip("transformers")
PATH = Path(__file__).parent / "llm_compressor"


def parameter(*shape: int) -> Tensor:
    """Each parameter of the model, in bfloat16."""
    values = (torch.arange(math.prod(shape)) * 7919 % 2003 - 1001) / 20000
    return values.bfloat16().float().view(shape)


def test_experts_are_the_models() -> None:
    with Checkpoint.open(PATH) as checkpoint:
        assert checkpoint.spec(0).format == "int4_g128"
        gate_up, down = checkpoint.weights(0).dequantize()
    # Half a step of uniform weights in 15 steps; another order would be more than 1 off.
    assert relative_error(gate_up, parameter(2, 256, 128)) < 0.07
    assert relative_error(down, parameter(2, 128, 128)) < 0.07
