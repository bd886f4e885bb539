"""Layouts of FlashInfer's kernels: the bytes that FlashInfer's own helpers make, and exact inverses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from polymoe.formats import FORMATS, QuantTensor
from polymoe.layouts import LAYOUTS
from polymoe.layouts.flashinfer import FOLDED_BITS, FlashInferSM90
from support.every_byte import assert_same, every_byte, spec_of

CPU = torch.device("cpu")
SM90 = ("flashinfer_sm90", "flashinfer_sm90_folded")


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", SM90)
def test_round_trip(name: str) -> None:
    layout = LAYOUTS[name]
    for hidden, intermediate in ((128, 128), (384, 256)):
        weights = every_byte("mxfp4", hidden, intermediate)
        packed = layout.pack(weights, CPU)
        assert packed.nbytes == layout.nbytes(weights.spec) == weights.spec.local_bytes
        assert_same(layout.unpack(packed), weights)
        other = every_byte("mxfp4", hidden, intermediate, seed=1)
        assert_same(layout.unpack(layout.pack(other, CPU, out=packed)), other)


def matrix(rows: int = 128, columns: int = 256) -> QuantTensor:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (rows, columns // 2), generator=g, dtype=torch.uint8)
    g.manual_seed(0)
    scales = torch.randint(256, (rows, columns // 32), generator=g, dtype=torch.uint8)
    return QuantTensor(codes, FORMATS["mxfp4"].encoding, scales.view(torch.float8_e8m0fnu))


# Of what FlashInfer 0.6.14 and 0.7.2 make of the same matrix: interleave_moe_scales_for_sm90_mixed_gemm, run on a CPU;
# and the kernels of interleave_moe_weights_for_sm90_mixed_gemm, each of their threads in turn.
GOLDEN = {
    "flashinfer_sm90": ("1192243345488f78", "15da2ed346aa99f6", (2, 512)),
    "flashinfer_sm90_folded": ("274eb8e751146ae0", "e810bd65b867380a", (2, 2, 16, 16)),
}


@pytest.mark.parametrize("name", SM90)
def test_bytes_are_those_of_flashinfers_helpers(name: str) -> None:
    layout = LAYOUTS[name]
    assert isinstance(layout, FlashInferSM90)
    parts, _ = layout.pack_matrix([matrix()])
    codes, scales, shape = GOLDEN[name]
    assert (digest(parts["codes"]), digest(parts["scales"])) == (codes, scales)
    assert (parts["codes"].shape, parts["scales"].shape) == ((128, 128), shape)


def places(name: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where each bit of bytes 0 to 31 of row 0 goes: (byte, bit) to (row, bit of the row)."""
    layout, q = LAYOUTS[name], matrix(128, 128)
    assert isinstance(layout, FlashInferSM90)
    for bit in range(256):
        q.codes.zero_()
        q.codes[0, bit // 8] = 1 << bit % 8
        codes = layout.pack_matrix([q])[0]["codes"]
        row, byte = codes.nonzero()[0].tolist()
        yield divmod(bit, 8), (row, 8 * byte + int(codes[row, byte]).bit_length() - 1)


def test_where_a_row_goes() -> None:
    """The formulas of the module's docstring."""
    for (byte, bit), (row, place) in places("flashinfer_sm90"):
        q, m, s, t = byte // 16, byte // 8 % 2, byte // 4 % 2, byte % 4
        assert (row, place) == (8 * m, 8 * (16 * q + 4 * t + 2 * s + bit // 4) + bit % 4)
    for (byte, bit), (row, place) in places("flashinfer_sm90_folded"):
        q, m, s, t = byte // 16, byte // 8 % 2, byte // 4 % 2, byte % 4
        assert (row, place) == (8 * m, 8 * (16 * q + 4 * t) + FOLDED_BITS[16 * s + bit])


@pytest.mark.parametrize("name", SM90)
def test_what_cannot_be_packed(name: str) -> None:
    layout = LAYOUTS[name]
    assert layout.check(spec_of("mxfp4", 4096, 2048)) == ()
    assert [str(r) for r in layout.check(spec_of("mxfp4", 2880, 2880))] == [
        "H: expects a multiple of 128, got 2880",
        "F: expects a multiple of 128, got 2880",
    ]
    assert {r.what for r in layout.check(spec_of("nvfp4", 4096, 2048))} == {
        f"{p} weights" for p in ("gate", "up", "down")
    }
