"""What the cubins are made from: the sources in this folder, and others that come from the table :mod:`.sizes`, which
are written only where they are compiled: ``sizes.cuh``, and in ``instantiations/`` a file for each unit of GEMM
kernels."""

from __future__ import annotations

import hashlib
import lzma
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from polymoe.kernels.cuda.sizes import (
    E4M3_BLOCK_K,
    E4M3_ROW_BYTES,
    FAMILIES,
    MAX_STAGES,
    PARTS,
    SM80_COPY_WARPS,
    TILE_ROWS,
    W4_FORMATS,
    W4A16_MMA,
    FamilySizes,
    FewRowsFamilySizes,
    MmaFamilySizes,
    OrderedMmaFamilySizes,
)
from polymoe.kernels.cuda.targets import TARGETS, Target

__all__ = ["COMPILER", "compress", "included", "source_hash", "sources", "unit_source"]

COMPILER = {
    "nvidia-cuda-nvcc": "13.3.73",
    "nvidia-cuda-crt": "13.3.73",
    "nvidia-nvvm": "13.3.73",
    "nvidia-cuda-runtime": "13.3.29",
}
"""Distributions that hold the compiler. From 13.3 on it keeps the registers of asynchronous instructions alive long
enough (release notes of CUDA 13.3, ptxas)."""

_HERE = Path(__file__).parent
_NOTICE = "// Generated from sizes.py by scripts/build-kernels; do not edit.\n"


def sources() -> dict[str, str]:
    """All files that kernels are compiled from, generated ones included: texts by path."""
    paths = [path for path in _HERE.rglob("*.cu*") if path.suffix in (".cu", ".cuh")]
    found = {path.relative_to(_HERE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    found["sizes.cuh"] = _header()
    for target in TARGETS.values():
        for family in (FAMILIES[name] for name in target.families):
            for format, sizes in family.formats.items():
                source = f"instantiations/{target.source(family, format)}"
                found[source] = unit_source(family, format, target.converts(sizes))
    return found


def _header() -> str:
    mma = W4A16_MMA
    constants = {
        "kMaxStages": MAX_STAGES,
        "kTileRows": TILE_ROWS,
        "kE4m3BlockK": E4M3_BLOCK_K,
        "kE4m3RowBytes": E4M3_ROW_BYTES,
        "kMmaConsumerWarps": mma.consumer_warps,
        "kMmaProducerWarps": mma.producer_warps,
        "kMmaStageBlocks": mma.stage_blocks,
    }
    lines = [f"constexpr int {name} = {value};\n" for name, value in constants.items()]
    lines.append(f"#ifdef POLYMOE_SM80\nconstexpr int kCopyWarps = {SM80_COPY_WARPS};\n#endif\n")
    for name, sizes in W4_FORMATS.items():
        if name.endswith("_zp"):  # twice the bytes of the same without zero points: dequant/int4.cuh
            continue
        struct = "".join(part.capitalize() for part in name.split("_"))
        values = f"kScaleBytes = {sizes.scale_bytes}, kScaleBlocks = {sizes.scale_blocks}"
        lines.append(f"\nstruct {struct}Sizes {{\n    static constexpr int {values};\n}};\n")
    return f"{_NOTICE}#pragma once\n\nnamespace polymoe {{\n\n{''.join(lines)}\n}}  // namespace polymoe\n"


def _macro(family: FamilySizes) -> str:
    """The macro for a family's kernels, after which one writes a name, threads and a function."""
    if isinstance(family, MmaFamilySizes):
        return "POLYMOE_FEW_ROWS_KERNEL"
    return "POLYMOE_ROUNDING_KERNEL" if isinstance(family, FewRowsFamilySizes) else "POLYMOE_GEMM_KERNEL"


def unit_source(family: FamilySizes, format: str, cvt: bool = False) -> str:
    """The source file with a family's kernels for a format. ``cvt``: instructions convert its codes and scales."""
    meaning = "the part, consumer warpgroups, blocks of 64 rows of weights for each, blocks of 64 columns\n"
    meaning += "// in a stage, bytes of a stage, block_m, and smaller widths for fewer rows of x."
    if isinstance(family, MmaFamilySizes):
        meaning = (
            "the part, rows of x in multiples of 8, block_n, teams of warps, bytes of a stage, and whether sums are"
        )
        meaning += "\n// ordered."
    if isinstance(family, FewRowsFamilySizes):
        meaning = "the part, warps, bytes of a stage, and whether sums are ordered."
    source = family.source or family.name
    meaning = f"what shares a scale, {meaning}" if family.scales else meaning
    includes = '#include "../dequant/fp4_cvt.cuh"\n' * cvt + f'#include "../gemm/{source}.cuh"\n'
    lines = [f"{_NOTICE}{includes}", "// clang-format off", f"// Last arguments: {meaning}"]
    sizes = family.formats[format]
    for part in family.parts:
        for block_m, tile in family.tiles.items():
            stage = family.stage_bytes(format, block_m)
            if isinstance(family, MmaFamilySizes):
                if block_m % 8:
                    continue  # runs in the kernel for the next multiple of 8
                shapes = [(name, family.mma_variant(name)) for name in family.variants(part)]
                ordered = ("true",) if isinstance(family, OrderedMmaFamilySizes) else ()
                choices = [(name, (block_m // 8, v.block_n, v.teams, stage, *ordered)) for name, v in shapes]
            elif isinstance(family, FewRowsFamilySizes):
                choices = [("", (family.warps, stage, *(("true",) if family.ordered else ())))]
            else:
                numbers = (tile.warpgroups, tile.n_blocks, tile.k_blocks, stage, block_m, *tile.widths)
                choices = [("", numbers)]
            for variant, numbers in choices:
                cpp = sizes and (sizes.cvt if cvt else sizes.cpp)
                format_argument = [family.scales] if family.scales else []
                format_argument += [cpp] if cpp and (len(family.formats) > 1 or family.source) else []
                arguments = ", ".join([*format_argument, PARTS[part], *map(str, numbers)])
                name, threads = family.kernel(part, block_m, variant), family.threads(block_m)
                lines.append(f"{_macro(family)}({name}, {threads}, {source}_gemm<{arguments}>)")
    return "\n".join(lines) + "\n"


def compress(cubin: bytes) -> bytes:
    """The contents of the file that stores a cubin."""
    return lzma.compress(cubin, preset=9 | lzma.PRESET_EXTREME)


def included(source: str, files: Mapping[str, str]) -> dict[str, str]:
    """A source file and all that it includes of ``files``, directly or not: texts by path, sorted."""
    found: dict[str, str] = {}
    left = [source]
    while left:
        path = left.pop()
        if path not in found:
            found[path] = files[path]
            names = re.findall(r'^#include "(.*)"', found[path], re.M)
            left += [posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) for name in names]
    return dict(sorted(found.items()))


def source_hash(unit: str, target: Target, files: Mapping[str, str]) -> str:
    """16 hexadecimal digits that change with any source that the unit includes, the compiler's version or its options.

    Comments and white space do not count, nor does what macros keep from the target, so that rewording or formatting a
    source, or a change for another GPU, renames no cubin.

    Args:
        unit, target: what is compiled.
        files: as :func:`sources` returns them.
    """
    digest = hashlib.sha256(repr((sorted(COMPILER.items()), target.options)).encode())
    for path, text in included(target.units[unit], files).items():
        code = re.sub("//.*", "", _seen(text, target.defines))
        digest.update(f"{path}\0{''.join(code.split())}\0".encode())
    return digest.hexdigest()[:16]


def _seen(text: str, defines: tuple[str, ...]) -> str:
    """A source without the lines that ``#ifdef POLYMOE_...`` keeps from a target. Other conditions stay."""
    lines: list[str] = []
    conditions: list[bool | None] = []  # around a line: whether it holds, None if it is another one
    for line in text.splitlines():
        own = re.match(r"#ifdef (POLYMOE_\w+)", line)
        if line.startswith("#if"):
            conditions.append(own[1] in defines if own else None)
        elif line.startswith("#else") and conditions[-1] is not None:
            conditions[-1] = not conditions[-1]
        directive = line.startswith(("#if", "#else", "#endif")) and conditions[-1] is not None
        if not directive and False not in conditions:
            lines.append(line)
        if line.startswith("#endif"):
            conditions.pop()
    return "\n".join(lines)
