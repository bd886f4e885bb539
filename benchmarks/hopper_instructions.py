"""Instructions that the Hopper kernels take for eight weights of each lane, by disassembly. Needs no GPU.

    python benchmarks/hopper_instructions.py [FILE]    the table, to FILE (default: standard output)

At 4.3 TB/s one of an H200's 132 multiprocessors gets eight 4-bit weights for each lane of a warp every 30 issue slots
of its four schedulers, so this number, more than any other, says how fast weights can be decoded. Loops are counted as
they stand, with both sides of a branch inside them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import triton

from polymoe.kernels.cuda import compiled
from polymoe.kernels.cuda.sizes import W4_FORMATS, W4A8, W4A16_WGMMA

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
"""The disassembler that comes with Triton."""

Instructions = list[tuple[int, str]]
"""Address and text of each."""


@cache
def disassembled(unit: str, name: str) -> Instructions:
    """A kernel's instructions."""
    command = [TOOL, "-sass", "-fun", name, compiled.cubin_path(unit)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [(int(a, 16), t.strip()) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)]


def loops(instructions: Instructions) -> Iterator[list[str]]:
    """Bodies of all loops: from a branch's target up to the branch, where that lies behind."""
    for address, text in instructions:
        branch = re.search(r"BRA.* 0x([0-9a-f]+)", text)
        if branch and (start := int(branch[1], 16)) < address:
            yield [t for a, t in instructions if start <= a <= address]


def decode_costs(format: str, matrix: str, rows: int, height: int) -> dict[int, float]:
    """Of a kernel for few rows: instructions for eight weights of a lane, by the rows of x that its loop multiplies."""
    # Two tiles of 16 rows by 64 columns are eight words; kernels for 16 rows have a loop for 8 too.
    found = disassembled(f"decode_{format}", f"decode_{matrix}_{rows}_{height}")
    loads = [(sum("LDSM.16.M88.4" in text for text in body), body) for body in loops(found)]  # two for 8 rows of x
    outer_first = sorted(loads, key=lambda load: -len(load[1]))
    return {4 * count: len(body) / 8 for count, body in outer_first if count in (2, 4)}


def prefill_loops(format: str, matrix: str, rows: int) -> list[list[str]]:
    """Of a kernel for many rows: its loops over whole stages, one or more for each width of its products."""
    found = disassembled(f"prefill_{format}", f"prefill_{matrix}_{rows}")
    under_way = [body for body in loops(found) if any(re.search(r"DEPBAR.*gsb0, 0x1", text) for text in body)]
    return [body for body in under_way if len(body) < 2 * min(map(len, under_way))]


def prefill_costs(format: str, matrix: str, rows: int) -> dict[int, float]:
    """The same of a kernel for many rows, by the width of the products."""
    costs: dict[int, float] = {}
    for body in prefill_loops(format, matrix, rows):
        widths = [int(width) for text in body for width in re.findall(r"HGMMA\.64x(\d+)x16", text)]
        cost = len(body) / len(widths)
        costs[widths[0]] = min(cost, costs.get(widths[0], cost))
    return costs


def e4m3_costs(matrix: str, rows: int) -> dict[int, float]:
    """Of a kernel for MXFP4 weights and E4M3 rows, by the width of products, which take sixteen weights of a lane."""
    costs: dict[int, float] = {}
    for body in loops(disassembled("w4a8_mxfp4", f"w4a8_{matrix}_{rows}")):
        widths = [int(width) for text in body for width in re.findall(r"QGMMA\.64x(\d+)x32", text)]
        if len(widths) == 8 and len(set(widths)) == 1 and len(body) < 450:  # two chains
            costs[widths[0]] = len(body) / (2 * len(widths))
    return costs


def table() -> str:
    """Of gate and up, all formats, as Markdown."""
    lines = ["| kernel | rows of x | " + " | ".join(W4_FORMATS) + " |", "|---|---|" + "---|" * len(W4_FORMATS)]
    rows: list[tuple[str, list[dict[int, float]]]] = [
        (f"decode, {rows} rows, {height} high", [decode_costs(f, "gated", rows, height) for f in W4_FORMATS])
        for rows in (8, 16)
        for height in (64, 128)
    ]
    rows += [
        (f"prefill, {rows} rows", [prefill_costs(f, "gated", rows) for f in W4_FORMATS]) for rows in W4A16_WGMMA.tiles
    ]
    rows += [(f"E4M3 rows, {rows} rows", [e4m3_costs("gated", rows)]) for rows in W4A8.tiles]
    for name, costs in rows:
        costs += [{}] * (len(W4_FORMATS) - len(costs))
        for width in sorted(costs[0]):
            cells = " | ".join(f"{cost[width]:.1f}" if width in cost else "" for cost in costs)
            lines.append(f"| {name} | {width} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(table(), encoding="utf-8")
    else:
        print(table(), end="")
