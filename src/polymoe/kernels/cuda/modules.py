"""The compiled kernels: one cubin for each unit and target, named by the hash of what it was made from.

Cubins are stored compressed, which makes them a tenth of their size: the kernels of a unit are much alike. Each is
decompressed once in a process, when the first of its kernels is asked for.
"""

from __future__ import annotations

import hashlib
import lzma
import posixpath
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from polymoe.kernels.cuda.driver import DriverError, Kernel, Module
from polymoe.kernels.cuda.targets import Target

__all__ = ["COMPILER", "SUFFIX", "compress", "cubin_path", "included", "kernel", "read_cubin", "source_hash"]

COMPILER = {
    "nvidia-cuda-nvcc": "13.3.73",
    "nvidia-cuda-crt": "13.3.73",
    "nvidia-nvvm": "13.3.73",
    "nvidia-cuda-runtime": "13.3.29",
}
"""Distributions that hold the compiler. From 13.3 on it keeps the registers of asynchronous instructions alive long
enough (release notes of CUDA 13.3, ptxas)."""

SUFFIX = ".cubin.xz"
"""How the names of compiled files end."""

_HERE = Path(__file__).parent


def included(source: str, read: Callable[[str], str] | None = None) -> dict[str, str]:
    """A source file and all that it includes of ours, directly or not: texts by path, sorted.

    Args:
        source: a path in this folder.
        read: gives a file's text; by default from this folder.
    """
    read = read or (lambda path: (_HERE / path).read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    left = [source]
    while left:
        path = left.pop()
        if path not in found:
            found[path] = read(path)
            names = re.findall(r'^#include "(.*)"', found[path], re.M)
            left += [posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) for name in names]
    return dict(sorted(found.items()))


def source_hash(unit: str, target: Target) -> str:
    """16 hexadecimal digits that change with any source that the unit includes, the compiler's version or its options.

    Comments and white space do not count, nor does what macros keep from the target, so that rewording or formatting a
    source, or a change for another GPU, renames no cubin.
    """
    digest = hashlib.sha256(repr((sorted(COMPILER.items()), target.options)).encode())
    for path, text in included(target.units[unit]).items():
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


def cubin_path(unit: str, target: Target) -> Path:
    """The compiled file of a unit for a target, whatever it was made from.

    Raises:
        DriverError: if there is not exactly one.
    """
    found = sorted(target.folder.glob(f"{unit}.*{SUFFIX}"))
    if len(found) != 1:
        raise DriverError(f"{target.folder}: expects one {unit}.*{SUFFIX}, got {len(found)}: run scripts/build-kernels")
    return found[0]


def compress(cubin: bytes) -> bytes:
    """The contents of the file that stores a cubin."""
    return lzma.compress(cubin, preset=9 | lzma.PRESET_EXTREME)


def read_cubin(path: Path) -> bytes:
    """The cubin in a file that :func:`cubin_path` found.

    Raises:
        DriverError: if the file is damaged.
    """
    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise DriverError(f"{path}: expects a compressed cubin, got a damaged file: install polymoe again") from error


@cache
def kernel(unit: str, name: str, target: Target) -> Kernel:
    """A kernel of a target, loaded when it is first asked for.

    Raises:
        DriverError: if the driver cannot load it.
    """
    return _module(unit, target).kernel(name, chained=not target.sm80)


@cache
def _module(unit: str, target: Target) -> Module:
    return Module(read_cubin(cubin_path(unit, target)))
