"""The kernel that moves the bits of words, emulated: the bytes that torch's operations give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polymoe.kernels.cuda import bits, modules
from polymoe.kernels.cuda.targets import SM90
from polymoe.layouts.cuda import bits as layouts
from polymoe.layouts.cuda import w4a8_fragments, w4a16_fragments, w8a16_fragments
from support.cuda_emulator import Emulator, compile_units, emulated

pytestmark = emulated
COLUMNS = {
    "E2M1": (w4a16_fragments._columns, w4a16_fragments.E2M1_BITS),
    "E2M1 as stored": (w4a16_fragments._columns, tuple(range(32))),
    "INT4": (w4a16_fragments._columns, w4a16_fragments.INT4_BITS),
    "E4M3": (w8a16_fragments._columns, w8a16_fragments.E4M3_BITS),
    "for E4M3": (w4a8_fragments._columns, w4a8_fragments.BITS),
}


def emulate(monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor]) -> list[int]:
    """Run the kernel in place of torch's operations; return the words of each launch."""
    launches = []

    def copy(to: Tensor, words: Tensor, positions: tuple[int, ...]) -> None:
        launches.append(words.numel() // 4)
        bits.copy_bits(to, words, positions, SM90, 0)

    monkeypatch.setattr(modules, "kernel", Emulator(compile_units(), tensors))
    monkeypatch.setattr(layouts, "copy_bits", copy)
    return launches


@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 104, 32), (1, 80, 96), (1, 16, 160)])
@pytest.mark.parametrize("order", COLUMNS)
def test_codes_are_packed_and_unpacked(
    order: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole groups of 64 rows and others, whole blocks of columns and others."""
    columns_of, positions = COLUMNS[order]
    if order != "for E4M3":
        shape = *shape[:2], shape[2] + (16 if order == "E4M3" else 8)
    columns, codes = columns_of(shape[2]), torch.randint(256, shape, dtype=torch.uint8)
    expected = layouts.pack_words(codes, columns, positions)
    launches = emulate(monkeypatch, [])
    assert torch.equal(layouts.pack_words(codes, columns, positions), expected)
    assert torch.equal(layouts.unpack_words(expected, shape, columns, positions), codes)
    assert sum(launches) == 2 * codes.numel() // 4


@pytest.mark.parametrize("count", [1, 511, 513, 3000])
def test_words_behind_each_other(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.randint(256, (count, 4), dtype=torch.uint8)
    positions = tuple(torch.randperm(32).tolist())
    moved = torch.zeros_like(words)
    expected = layouts.move_bits(words, positions)
    emulate(monkeypatch, [])
    bits.copy_bits(moved.view(-1, 2, 2), words.view(-1, 2, 2), positions, SM90, 0)
    assert torch.equal(moved, expected)
