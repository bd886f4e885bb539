"""Quantizing on a GPU."""

from __future__ import annotations

import pytest
import torch

from polymoe.formats import Encoding, format_of
from support.quantized import assert_same, rough_weights
from support.variants import ENCODINGS


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_gpu_makes_the_same_bytes(encoding: Encoding) -> None:
    w = rough_weights(320, 288)
    f = format_of(encoding)
    q = f.quantize(w.cuda())
    assert q.device.type == "cuda"
    assert_same(q.to("cpu"), f.quantize(w))
    assert torch.equal(q.dequantize().cpu(), f.quantize(w).dequantize())
    again = f.quantize(q.dequantize())  # largest weights that are exact multiples of their scales
    assert_same(again.to("cpu"), f.quantize(f.quantize(w).dequantize()))
