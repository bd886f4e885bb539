"""The assembly that decodes INT4 exactly: its instructions, as PTX defines them, on a CPU."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polymoe.kernels.triton.decode import INT4_EXACT_ASM, INT4_EXACT_HALF_ASM


def halves(register: Tensor) -> Tensor:
    """The two bfloat16 of 32-bit registers [N], as float64 [N, 2]: the low half first."""
    bits = torch.stack((register & 0xFFFF, (register >> 16) & 0xFFFF), 1)
    return (bits << 48 >> 48).to(torch.int16).view(torch.bfloat16).double()


def registers(values: Tensor) -> Tensor:
    """Numbers [N, 2] rounded to bfloat16, as registers. float64 holds each result of the test's FMAs exactly, and so
    does float32, through which torch rounds."""
    assert torch.equal(values.float().double(), values)
    bits = values.float().to(torch.bfloat16).view(torch.int16).long() & 0xFFFF
    return bits[:, 0] | (bits[:, 1] << 16)


def permuted(low: Tensor, high: Tensor, selector: int) -> Tensor:
    both = low | (high << 32)
    return sum(((both >> (8 * (selector >> (4 * i) & 15))) & 255) << (8 * i) for i in range(4))  # type: ignore[return-value]


def executed(assembly: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all registers after the assembly, whose operands are 32-bit registers [N], held in int64."""
    found = dict(inputs)
    size = len(next(iter(inputs.values())))

    def value(name: str) -> Tensor:
        return torch.full((size,), int(name, 0)) if name[0].isdigit() else found[name]

    for line in re.split(r"[;\n]", assembly):
        name, _, operands = line.strip().partition(" ")
        if not name or name in "{}" or name == ".reg":
            continue
        to, *sources = operands.replace(" ", "").split(",")
        a, *rest = map(value, sources)
        if name == "mov.b32":
            found[to] = a
        elif name == "shr.u32":
            found[to] = a >> int(sources[1])
        elif name in ("and.b32", "or.b32"):
            found[to] = a & rest[0] if name == "and.b32" else a | rest[0]
        elif name == "xor.b32":
            found[to] = a ^ rest[0]
        elif name == "prmt.b32":
            found[to] = permuted(a, rest[0], int(sources[2], 0))
        else:
            assert name == "fma.rn.bf16x2", line
            found[to] = registers(halves(a) * halves(rest[0]) + halves(rest[1]))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_operands_are_every_weight(dtype: torch.dtype) -> None:
    """Each code, with zero points 0, 8 and 15, times every scale that is not huge, exactly."""
    scales = torch.arange(0x7D00 if dtype == torch.bfloat16 else 0x7C00).to(torch.int16).view(dtype)
    nearest = scales.to(torch.bfloat16)
    factors = {"$9": registers(nearest.double()[:, None].expand(-1, 2))}
    if dtype == torch.float16:  # as factor_half makes them: the scales of two words
        rest = (scales.double() - nearest.double()).to(torch.bfloat16)
        factors["$9"] = factors["$10"] = registers(torch.stack((nearest, rest), 1).double())
    zero_at, assembly = ("$10", INT4_EXACT_ASM) if dtype == torch.bfloat16 else ("$11", INT4_EXACT_HALF_ASM)
    for zero_point in (0, 8, 15):
        zero = registers(torch.full((len(scales), 2), -128.0 - zero_point).double())
        for low in range(0, 16, 4):  # of the word in the low half; that in the high half has the codes backwards
            word = sum((low + p) << (4 * p) | (15 - low - p) << (4 * p + 16) for p in range(4))
            codes = {"$8": torch.full((len(scales),), word), zero_at: zero}
            found = executed(assembly.value, {**codes, **factors})
            for p in range(4):
                first, second = halves(found[f"${p}"]), halves(found[f"${p + 4}"])
                code = torch.tensor([low + p, 15 - low - p]) - zero_point
                assert torch.equal(first + second, code * scales.double()[:, None])
