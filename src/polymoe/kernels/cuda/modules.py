"""The compiled kernels: one cubin for each unit and target, named by the hash of what it was made from.

Cubins are stored compressed, which makes them a tenth of their size: the kernels of a unit are much alike. Each is
decompressed once in a process, when the first of its kernels is asked for.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

from polymoe.kernels.cuda.driver import DriverError, Kernel, Module
from polymoe.kernels.cuda.targets import Target

__all__ = ["SUFFIX", "cubin_path", "kernel", "read_cubin"]

SUFFIX = ".cubin.xz"
"""How the names of compiled files end."""


def cubin_path(unit: str, target: Target) -> Path:
    """The compiled file of a unit for a target, whatever it was made from.

    Raises:
        DriverError: if there is not exactly one.
    """
    found = sorted(target.folder.glob(f"{unit}.*{SUFFIX}"))
    if len(found) != 1:
        raise DriverError(f"{target.folder}: expects one {unit}.*{SUFFIX}, got {len(found)}: run scripts/build-kernels")
    return found[0]


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
