"""The compiled kernels: one cubin a source file, under the hash of what it was made from."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from polymoe.kernels.cuda.driver import DriverError, Kernel, Module

__all__ = ["COMPILER", "OPTIONS", "UNITS", "cubin_path", "kernel", "source_hash"]

COMPILER = {
    "nvidia-cuda-nvcc": "13.3.73",
    "nvidia-cuda-crt": "13.3.73",
    "nvidia-nvvm": "13.3.73",
    "nvidia-cuda-runtime": "13.3.29",
}
"""Distributions that hold the compiler. From 13.3 on it keeps the registers of asynchronous products alive long enough
(release notes of CUDA 13.3, ptxas)."""

OPTIONS = ("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-Xptxas=-warn-spills")
"""How it is called."""

UNITS = (
    *(
        f"{kernels}_{format}"
        for kernels in ("decode", "prefill")
        for format in ("mxfp4", "nvfp4", "int4_g32", "int4_g128")
    ),
    "w4a8_mxfp4",
    "whole_bf16",
    "fp8_block128",
    "w8a8_fp8_block128",
    "rows",
    "rows_fp8",
)
"""Source files that are compiled, without suffix."""

_HERE = Path(__file__).parent


def source_hash() -> str:
    """16 hexadecimal digits that change with any source, the compiler's version or its options."""
    digest = hashlib.sha256(repr((sorted(COMPILER.items()), OPTIONS)).encode())
    for path in sorted([*_HERE.glob("*.cu"), *_HERE.glob("*.cuh")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


def cubin_path(unit: str) -> Path:
    """The compiled file of a unit, whatever it was made from.

    Raises:
        DriverError: if there is not exactly one.
    """
    found = sorted((_HERE / "cubins").glob(f"{unit}.*.cubin"))
    if len(found) != 1:
        raise DriverError(
            f"kernels/cuda/cubins: expected one {unit}.*.cubin, got {len(found)}: run scripts/build-kernels"
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
