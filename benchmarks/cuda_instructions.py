"""Instructions that the CUDA kernels take for eight weights of each lane, by disassembly. Needs no GPU.

    python benchmarks/cuda_instructions.py [FILE]    the table, to FILE (default: standard output)

At 4.3 TB/s one of an H200's 132 SMs gets eight 4-bit weights for each lane of a warp every 30 issue slots
of its four schedulers, so this number, more than any other, says how fast weights can be decoded. Loops are counted as
they stand, with both sides of a branch inside them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import triton

from polymoe.common.atomic import replace_file
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.spec import (
    W4_FORMATS,
    W4A8,
    W4A8_ROWS,
    W4A16_MMA,
    W4A16_MMA_TILED,
    W4A16_WGMMA,
    W8A16_MMA,
    W8A16_MMA_TILED,
    W8A16_WGMMA,
    KernelFamily,
)
from polymoe.kernels.cuda.targets import SM90, TARGETS, Target

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
"""The disassembler that comes with Triton."""

Instructions = list[tuple[int, str]]
"""Address and text of each."""


def dump(option: str, unit: str, target: Target) -> str:
    """What the disassembler says of a unit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(modules.read_cubin(unit, target))
        cubin.flush()
        return subprocess.run([TOOL, option, cubin.name], check=True, capture_output=True, text=True).stdout


@cache
def _kernels(unit: str, target: Target) -> dict[str, Instructions]:
    """All kernels of a unit by name: disassembling one takes nearly half as long as disassembling all."""
    found = {}
    for kernel in dump("-sass", unit, target).split("Function : ")[1:]:
        name, _, lines = kernel.partition("\n")
        found[name.strip()] = [(int(a, 16), t.strip()) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", lines)]
    return found


def disassembled(unit: str, name: str, target: Target = SM90) -> Instructions:
    """A kernel's instructions."""
    return _kernels(unit, target)[name]


def loops(instructions: Instructions) -> Iterator[list[str]]:
    """Bodies of all loops: from a branch's target up to the branch, where that comes later."""
    for address, text in instructions:
        branch = re.search(r"BRA.* 0x([0-9a-f]+)", text)
        if branch and (start := int(branch[1], 16)) < address:
            yield [t for a, t in instructions if start <= a <= address]


def _family(format: str, of_4_bits: KernelFamily, of_8_bits: KernelFamily) -> KernelFamily:
    return of_8_bits if format in of_8_bits.formats else of_4_bits


def mma_costs(format: str, part: str, block_m: int, target: Target = SM90) -> dict[int, float]:
    """Of a w4a16_mma or w8a16_mma kernel that divides K between warps: instructions for eight weights of a lane, by the
    rows of x that its loop multiplies."""
    # Two tiles of 16 rows by 64 columns, or 32 of 8 bits, are eight words. The compiler may unroll the loop.
    family, steps = _family(format, W4A16_MMA, W8A16_MMA), 2 if format == "mxfp8" else 4
    found = disassembled(family.unit(format), family.kernel(part, block_m, "n64"), target)
    once = "PHASECHK.TRANS64.TRYWAIT"  # for each block: the wait for a stage
    costs = {}
    for body in sorted(loops(found), key=len, reverse=True):  # outer ones first
        loads, products, times = (sum(name in text for text in body) for name in ("LDSM.16.M88.4", "HMMA.16816", once))
        if times and 2 * loads / times in (steps, 2 * steps) and products == 4 * loads:  # a load for two steps
            costs[16 * loads // (steps * times)] = len(body) / (2 * steps * times)
    return costs


def tiled_costs(format: str, part: str, block_m: int, target: Target) -> dict[int, float]:
    """The same of a w4a16_mma_tiled or w8a16_mma_tiled kernel, by the rows of x that a loop multiplies."""
    # A lane's part of 32 rows of weights by 64 columns is 64 weights, of which eight take one MMA for 8 rows of x.
    family = _family(format, W4A16_MMA_TILED, W8A16_MMA_TILED)
    found = disassembled(family.unit(format), family.kernel(part, block_m), target)
    costs = {}
    for body in loops(found):
        loads, products = (sum(name in text for text in body) for name in ("LDSM.16.M88.4", "HMMA.16816"))
        if products in (*family.tiles[block_m].widths, block_m) and products == 4 * loads:
            costs[products] = min(len(body) / 8, costs.get(products, len(body) / 8))
    return costs


def wgmma_loops(format: str, part: str, block_m: int) -> list[list[str]]:
    """Of a w4a16_wgmma or w8a16_wgmma kernel: its loops over whole stages, one or more for each width of wgmma."""
    family = _family(format, W4A16_WGMMA, W8A16_WGMMA)
    found = disassembled(family.unit(format), family.kernel(part, block_m))
    in_flight = [body for body in loops(found) if any(re.search(r"DEPBAR.*gsb0, 0x1", text) for text in body)]
    return [body for body in in_flight if len(body) < 2 * min(map(len, in_flight))]


def wgmma_costs(format: str, part: str, block_m: int) -> dict[int, float]:
    """The same of a w4a16_wgmma kernel, by the width of wgmma."""
    costs: dict[int, float] = {}
    for body in wgmma_loops(format, part, block_m):
        widths = [int(width) for text in body for width in re.findall(r"HGMMA\.64x(\d+)x16", text)]
        cost = len(body) / len(widths)
        costs[widths[0]] = min(cost, costs.get(widths[0], cost))
    return costs


def w4a8_costs(family: KernelFamily, format: str, part: str, block_m: int) -> dict[int, float]:
    """The same of a w4a8 or w4a8_rows kernel, by the width of wgmma, each of which takes sixteen weights of a lane."""
    costs: dict[int, float] = {}
    if format not in family.formats:
        return costs
    # Two chains of four, or 256 columns of each block of 64 rows, of INT4 128.
    mmas = (8 if format == "mxfp4" else 4) * family.tiles[block_m].n_blocks if family is W4A8_ROWS else 8
    for body in loops(disassembled(family.unit(format), family.kernel(part, block_m))):
        widths = [int(width) for text in body for width in re.findall(r"QGMMA\.64x(\d+)x32", text)]
        if len(widths) == mmas and len(set(widths)) == 1 and len(body) < 56 * mmas:
            costs[widths[0]] = len(body) / (2 * len(widths))
    return costs


FORMATS = (*W4_FORMATS, *W8A16_MMA.formats)


def table(formats: tuple[str, ...] = FORMATS) -> str:
    """Of gate and up, as Markdown. Kernels are SM90's unless a row names another target."""
    lines = ["| kernel | rows of x | " + " | ".join(formats) + " |", "|---|---|" + "---|" * len(formats)]
    part = "gate_up"
    rows: list[tuple[str, list[dict[int, float]]]] = [
        (W4A16_MMA.kernel(part, m, "n64"), [mma_costs(f, part, m) for f in formats]) for m in W4A16_MMA.tiles
    ]
    rows += [(W4A16_WGMMA.kernel(part, m), [wgmma_costs(f, part, m) for f in formats]) for m in W4A16_WGMMA.tiles]
    rows += [
        (f.kernel(part, m), [w4a8_costs(f, each, part, m) for each in formats])
        for f in (W4A8, W4A8_ROWS)
        for m in f.tiles
    ]
    rows += [
        (f"{W4A16_MMA.kernel(part, m, 'n64')}, {t.name}", [mma_costs(f, part, m, t) for f in formats])
        for t in TARGETS.values()
        if t is not SM90 and W4A16_MMA.name in t.families
        for m in W4A16_MMA.tiles
    ]
    rows += [
        (f"{W4A16_MMA_TILED.kernel(part, m)}, {t.name}", [tiled_costs(f, part, m, t) for f in formats])
        for t in TARGETS.values()
        if W4A16_MMA_TILED.name in t.families
        for m in W4A16_MMA_TILED.tiles
    ]
    for name, costs in rows:
        costs += [{}] * (len(formats) - len(costs))
        for width in sorted(costs[0]):
            cells = " | ".join(f"{cost[width]:.1f}" if width in cost else "" for cost in costs)
            lines.append(f"| {name} | {width} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    if len(sys.argv) == 2:
        replace_file(Path(sys.argv[1]), table())
    else:
        print(table(), end="")
