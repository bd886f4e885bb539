"""The compiled kernels: one cubin for each unit and target, named by the hash of what it was made from.

A kernel family's cubins for a target are in one archive, compressed as a whole, which makes them a fifteenth of their
size: they are much alike. An archive is decompressed when a kernel of one of its units is first asked for, in at most
27 ms; what a process keeps is the unit's cubin.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from functools import cache
from pathlib import Path

from polymoe.kernels.cuda.driver import DriverError, Kernel, Module
from polymoe.kernels.cuda.targets import Target

SUFFIX = ".tar.xz"
"""How the names of archives end."""


def archive_path(archive: str, target: Target) -> Path:
    """The file of an archive, of ``Target.archives``."""
    return target.folder / f"{archive}{SUFFIX}"


def read_archive(path: Path) -> dict[str, bytes]:
    """All cubins of an archive by file name, ``UNIT.HASH.cubin``.

    Raises:
        DriverError: if the file is missing or damaged.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(path.read_bytes()))) as archive:
            return {member.name: part.read() for member in archive if (part := archive.extractfile(member))}
    except FileNotFoundError:
        raise DriverError(f"{path}: expects compiled kernels, got no file: run scripts/build-kernels") from None
    except lzma.LZMAError as error:
        raise DriverError(f"{path}: expects an archive, got a damaged file: install polymoe again") from error


def read_cubin(unit: str, target: Target) -> bytes:
    """The cubin of a unit, whatever it was made from.

    Raises:
        DriverError: if its archive is missing, damaged or lacks it.
    """
    path = archive_path(next(name for name, units in target.archives.items() if unit in units), target)
    for name, cubin in read_archive(path).items():
        if name.partition(".")[0] == unit:
            return cubin
    raise DriverError(f"{path}: expects a cubin of {unit}, got none: run scripts/build-kernels")


@cache
def kernel(unit: str, name: str, target: Target) -> Kernel:
    """A kernel of a target, loaded when it is first asked for.

    Raises:
        DriverError: if the driver cannot load it.
    """
    return _module(unit, target).kernel(name, chained=target.chained)


@cache
def _module(unit: str, target: Target) -> Module:
    return Module(read_cubin(unit, target))
