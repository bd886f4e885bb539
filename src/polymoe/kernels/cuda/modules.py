"""The compiled kernels: one cubin a unit and architecture, named by the hash of what it was made from."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from polymoe.kernels.cuda.driver import DriverError, Kernel, Module
from polymoe.kernels.cuda.sizes import FAMILIES

__all__ = ["COMPILER", "OPTIONS", "UNITS", "cubin_path", "included", "kernel", "source_hash"]

COMPILER = {
    "nvidia-cuda-nvcc": "13.3.73",
    "nvidia-cuda-crt": "13.3.73",
    "nvidia-nvvm": "13.3.73",
    "nvidia-cuda-runtime": "13.3.29",
}
"""Distributions that hold the compiler. From 13.3 on it keeps the registers of asynchronous instructions alive long
enough (release notes of CUDA 13.3, ptxas)."""

OPTIONS = ("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-Xptxas=-warn-spills")
"""How it is called."""

UNITS: dict[str, str] = {
    **{f.unit(format): f"instantiations/{f.unit(format)}.cu" for f in FAMILIES.values() for format in f.formats},
    **{name: f"{name}.cu" for name in ("permute", "finalize", "quantize")},
}
"""Units that are compiled, and the source file of each."""

_HERE = Path(__file__).parent
_CUBINS = "cubins/sm90"


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


def source_hash(unit: str) -> str:
    """16 hexadecimal digits that change with any source that the unit includes, the compiler's version or its options.

    Comments and white space do not count, so that rewording or formatting a source renames no cubin.
    """
    digest = hashlib.sha256(repr((sorted(COMPILER.items()), OPTIONS)).encode())
    for path, text in included(UNITS[unit]).items():
        code = re.sub("//.*", "", text)
        digest.update(f"{path}\0{''.join(code.split())}\0".encode())
    return digest.hexdigest()[:16]


def cubin_path(unit: str) -> Path:
    """The compiled file of a unit, whatever it was made from.

    Raises:
        DriverError: if there is not exactly one.
    """
    found = sorted((_HERE / _CUBINS).glob(f"{unit}.*.cubin"))
    if len(found) != 1:
        raise DriverError(
            f"kernels/cuda/{_CUBINS}: expects one {unit}.*.cubin, got {len(found)}: run scripts/build-kernels"
        )
    return found[0]


@cache
def kernel(unit: str, name: str) -> Kernel:
    """A kernel, loaded when it is first asked for.

    Raises:
        DriverError: if the driver cannot load it.
    """
    return _module(unit).kernel(name)


@cache
def _module(unit: str) -> Module:
    return Module(cubin_path(unit).read_bytes())
