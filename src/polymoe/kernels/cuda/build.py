"""What the cubins are made from: the sources in this folder, and others that come from the table :mod:`.spec`, which
are written only where they are compiled: ``sizes.cuh``, and in ``instantiations/`` a file for each unit of GEMM
kernels."""

from __future__ import annotations

import hashlib
import io
import lzma
import posixpath
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from polymoe.kernels.cuda.pipelines import E4M3_BLOCK_K, E4M3_ROW_BYTES, MAX_STAGES, TeamPipeline
from polymoe.kernels.cuda.spec import (
    KERNEL_FAMILIES,
    PARTS,
    TILE_ROWS,
    W4_FORMATS,
    KernelFamily,
)
from polymoe.kernels.cuda.targets import TARGETS, Target

COMPILER = {
    "nvidia-cuda-nvcc": "13.3.73",
    "nvidia-cuda-crt": "13.3.73",
    "nvidia-nvvm": "13.3.73",
    "nvidia-cuda-runtime": "13.3.29",
}
"""Distributions that hold the compiler. From 13.3 on it keeps the registers of asynchronous instructions alive long
enough (release notes of CUDA 13.3, ptxas)."""

_HERE = Path(__file__).parent
_NOTICE = "// Generated from spec.py by scripts/build-kernels; do not edit.\n"


def sources() -> dict[str, str]:
    """All files that kernels are compiled from, generated ones included: texts by path."""
    paths = [path for path in _HERE.rglob("*.cu*") if path.suffix in (".cu", ".cuh")]
    found = {path.relative_to(_HERE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    found["sizes.cuh"] = _header()
    for target in TARGETS.values():
        for family in (KERNEL_FAMILIES[name] for name in target.families):
            for format, weights in family.formats.items():
                source = f"instantiations/{target.source(family, format)}"
                found[source] = unit_source(family, format, target.converts(weights))
    return found


def _header() -> str:
    constants = {
        "kMaxStages": MAX_STAGES,
        "kTileRows": TILE_ROWS,
        "kE4m3BlockK": E4M3_BLOCK_K,
        "kE4m3RowBytes": E4M3_ROW_BYTES,
        "kMmaConsumerWarps": TeamPipeline.consumer_warps,
        "kMmaProducerWarps": TeamPipeline.producer_warps,
        "kMmaStageBlocks": TeamPipeline.stage_blocks,
    }
    lines = [f"constexpr int {name} = {value};\n" for name, value in constants.items()]
    for name, weights in W4_FORMATS.items():
        if name.endswith("_zp"):  # twice the bytes of the same without zero points: dequant/int4.cuh
            continue
        struct = "".join(part.capitalize() for part in name.split("_"))
        values = f"kScaleBytes = {weights.scale_bytes}, kScaleBlocks = {weights.scale_blocks}"
        lines.append(f"\nstruct {struct}Sizes {{\n    static constexpr int {values};\n}};\n")
    return f"{_NOTICE}#pragma once\n\nnamespace polymoe {{\n\n{''.join(lines)}\n}}  // namespace polymoe\n"


def unit_source(family: KernelFamily, format: str, cvt: bool = False) -> str:
    """The source file with a family's kernels for a format. ``cvt``: instructions convert its codes and scales."""
    source, weights = family.source or family.name, family.formats[format]
    headers = ["entry", *(["dequant/fp4_cvt"] if cvt else []), f"gemm/{source}"]
    lines = [_NOTICE + "".join(f'#include "../{header}.cuh"\n' for header in headers)]
    lines.append("// clang-format off")
    cpp = weights.cvt if cvt else weights.cpp
    for part in family.parts:
        for block_m, tile in family.tiles.items():
            for variant in family.variants(part):
                numbers = map(str, family.warps.template(weights, tile, variant))
                arguments = ", ".join(filter(None, (family.scales, cpp, PARTS[part], *numbers)))
                name, threads = family.kernel(part, block_m, variant), family.threads(block_m)
                function = f"{source}_gemm<{arguments}>"
                lines.append(f"POLYMOE_KERNEL({name}, {family.args.__name__}, ({threads}, 1), {function})")
    return "\n".join(lines) + "\n"


def archive(cubins: Mapping[str, bytes]) -> bytes:
    """The contents of the archive with cubins by file name. It depends on nothing else."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, cubin in cubins.items():
            member = tarfile.TarInfo(name)
            member.size = len(cubin)
            file.addfile(member, io.BytesIO(cubin))
    # Instructions have 16 bytes: literals and matches depend on the position in one.
    options = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 4, "pb": 4}
    return lzma.compress(packed.getvalue(), filters=[options])


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


def cubin_name(unit: str, target: Target, files: Mapping[str, str]) -> str:
    """The name of a unit's cubin in its archive. Arguments as for :func:`source_hash`."""
    return f"{unit}.{source_hash(unit, target, files)}.cubin"


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
