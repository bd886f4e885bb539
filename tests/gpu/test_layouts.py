"""Layouts whose words a kernel packs on a GPU: the bytes that torch's operations give on a CPU."""

from __future__ import annotations

import pytest
import torch

from polymoe.layouts import LAYOUTS
from polymoe.layouts.pack_check import pack_checked
from support.problems import random_experts

WHOLE, OTHERS = (128, 256), (80, 208)
"""Sizes in whole groups of 64 rows and blocks of columns, and others."""


@pytest.mark.parametrize(
    ("name", "format", "sizes"),
    [
        ("w4a16_fragments", "mxfp4", WHOLE), ("w4a16_fragments", "nvfp4", OTHERS),
        ("w4a16_fragments", "int4_g128_zp", WHOLE), ("w4a16_fragments_cvt", "mxfp4", OTHERS),
        ("w4a8_fragments", "mxfp4", WHOLE), ("w4a8_fragments", "int4_g128_zp", WHOLE),
        ("w8a16_fragments", "mxfp8", WHOLE), ("w8a16_fragments", "mxfp8", OTHERS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gated", [True, False])
def test_packed_bytes_are_those_of_a_cpu(name: str, format: str, sizes: tuple[int, int], gated: bool) -> None:
    weights = random_experts(format, experts=7, hidden=sizes[0], intermediate=sizes[1], gated=gated)
    expected = LAYOUTS[name].pack(weights, torch.device("cpu"))
    packed = pack_checked(LAYOUTS[name], weights, torch.device("cuda"), "experts")
    for part, tensor in expected.tensors.items():
        assert torch.equal(packed.tensors[part].cpu().view(torch.uint8), tensor.view(torch.uint8)), part
