"""The CUDA kernels' sources, compiled for the CPU that runs the tests: see ``cuda.h``."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from polymoe.kernels.cuda.build import included, sources
from polymoe.kernels.cuda.spec import (
    W4A16_MMA,
    W4A16_MMA_ORDERED,
    W8A8_MMA,
    W8A8_MMA_CHANNEL,
    W8A8_MMA_ORDERED,
    W8A8_MMA_ORDERED_CHANNEL,
    W8A16_MMA,
)
from polymoe.kernels.cuda.targets import SM90, Target

__all__ = ["Emulator", "compile_files", "compile_unit", "compile_units", "emulated"]

emulated = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
HERE = Path(__file__).parent
FEW_ROWS = (W4A16_MMA, W4A16_MMA_ORDERED, W8A16_MMA)
ROUNDING = (W8A8_MMA, W8A8_MMA_ORDERED, W8A8_MMA_CHANNEL, W8A8_MMA_ORDERED_CHANNEL)
AROUND = {
    "slots": ("PlaceExpertsArgs", "FetchExpertsArgs"),
    "bits": ("MoveBitsArgs",),
    "permute": ("PermutationArgs", "PermuteArgs"),
    "finalize": ("FinalizeArgs",),
    "quantize": ("QuantizePermutedArgs", "QuantizeRowsArgs", "QuantizeWholeRowsArgs"),
}
"""Structures that the kernels around the GEMMs take, by unit. These are compiled together: most of the time that one
takes goes to headers."""
ARGS = {
    **{f.unit(format): ("RoundingArgs",) for f in ROUNDING for format in f.formats},
    **{f.unit(format): ("FewRowsArgs",) for f in FEW_ROWS for format in f.formats},
}
"""Structures that kernels of a unit of GEMMs take; those of the others take GemmArgs."""
# Ubuntu's g++ defines _FORTIFY_SOURCE, whose longjmp ends a program that jumps to another stack, as the emulator does.
COMPILER = ("g++", "-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-std=c++17", "-w")
UNUSED_DAYS = 14
"""After which a compiled library is removed."""


@cache
def compile_unit(unit: str, target: Target = SM90) -> ctypes.CDLL:
    """A shared library with the kernels of a unit, configured as for ``target``."""
    files = sources()
    if unit not in AROUND:
        return compile_files(files, target.units[unit], ARGS.get(unit, ("GemmArgs",)), unit, target.defines)
    files["around.cu"] = "".join(f'#include "{target.units[name]}"\n' for name in AROUND)
    args = tuple(struct for structs in AROUND.values() for struct in structs)
    return compile_files(files, "around.cu", args, "around", target.defines)


def compile_units(*units: str, target: Target = SM90) -> dict[str, ctypes.CDLL]:
    """What a call takes: libraries of the kernels around the GEMMs, and of units of these, by unit."""
    return {unit: compile_unit(unit, target) for unit in (*AROUND, *units)}


def compile_files(
    files: dict[str, str], unit: str, args: tuple[str, ...], name: str, defines: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """A source file among others, with asynchronous copies, barriers and MMAs emulated.

    Compiled once for the same sources and compiler: libraries stay in a folder that all runs and workers share.

    Args:
        files: texts by path.
        unit: the path of the one to compile.
        args: structures that its kernels take.
        name: of the library.
        defines: macros that are defined.
    """
    own = {path.relative_to(HERE).as_posix(): path.read_text() for path in HERE.rglob("*.*h")}
    calls = "".join(f"POLYMOE_CALL({struct})\n" for struct in args)
    macros = "".join(f"#define {name}\n" for name in defines)
    main = {"main.cpp": f'{macros}#include "cuda.h"\n#include "{unit}"\n{calls}'}
    read = included("main.cpp", {**files, **own, **main})
    texts = {
        path: text.replace("extern __shared__", "extern").replace("__shared__", "static") for path, text in read.items()
    }
    key = hashlib.sha256(repr((COMPILER, _compiler_version(), sorted(texts.items()))).encode()).hexdigest()[:16]
    folder = _folder()
    target = folder / f"{name}.{key}.so"
    with FileLock(f"{target}.lock"):
        if target.exists():
            os.utime(target)
        else:
            _compile(texts, target)
            _remove_unused(folder)
    library = ctypes.CDLL(str(target))
    library.emulate.restype = ctypes.c_char_p
    return library


@cache
def _compiler_version() -> str:
    return subprocess.run([COMPILER[0], "--version"], check=True, capture_output=True, text=True).stdout


def _folder() -> Path:
    """Of compiled libraries: in the virtual environment, or where that is read-only, among temporary files."""
    environment = Path(sys.prefix)
    inside = sys.prefix != sys.base_prefix and os.access(environment, os.W_OK)
    folder = environment / "cuda-emulator" if inside else Path(tempfile.gettempdir(), f"cuda-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _compile(texts: dict[str, str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        for path, text in texts.items():
            file = Path(temporary, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        made = Path(temporary, "made.so")
        subprocess.run([*COMPILER, "-o", made, Path(temporary, "main.cpp")], check=True)
        made.replace(target)


def _remove_unused(folder: Path) -> None:
    for path in folder.glob("*.so*"):
        if path.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
            path.unlink(missing_ok=True)


class Emulator:
    """Takes the place of ``modules.kernel``: kernels run here and now, on the CPU."""

    def __init__(
        self,
        libraries: dict[str, ctypes.CDLL],
        tensors: list[Any],
        seed: int = 0,
        coarse: bool = False,
        aligned: bool = False,
    ) -> None:
        """``coarse``: E4M3 products are accumulated as Hopper does, not exactly. ``aligned``: those of 16 bits are
        accumulated as tensor cores do from Hopper on."""
        for library in libraries.values():
            library.set_sums(coarse, aligned)
        self.libraries, self.seed, self.made = libraries, seed, []
        flat = [v for t in tensors for v in (t.data_ptr(), t.numel() * t.element_size())]
        self.ranges = (ctypes.c_long * len(flat))(*flat)

    def __call__(self, unit: str, name: str, target: Target) -> Any:
        """A kernel by its name, whose prepared launches run when they are called."""
        library = self.libraries[unit]

        def call(args: ctypes.Structure, grid: Any, threads: int, shared: int = 0) -> None:
            self.seed += 1
            self.made.append(name)
            struct = type(args).__name__
            assert getattr(library, f"size_of_{struct}")() == ctypes.sizeof(args), struct
            grid = (*grid, 1)[:2]
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            error = library.emulate(
                getattr(library, f"call_{struct}"),
                address,
                ctypes.byref(args),
                *grid,
                threads,
                shared,
                self.seed,
                self.ranges,
                len(self.ranges) // 2,
            )
            assert error is None, f"{name}: {error.decode()}"

        return Recorded(call)


class Recorded:
    """Takes the place of ``driver.Kernel``: each launch is a call of ``made(args, grid, threads, shared)``."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def prepare(self, args: ctypes.Structure, threads: int, shared_bytes: int = 0) -> Any:
        """As ``driver.Kernel.prepare``."""
        made = self.made

        class Launch:
            grid: tuple[int, ...] = (1,)

            def set_grid(self, x: int, y: int = 1) -> None:
                self.grid = (x, y)

            def __call__(self, stream: int) -> None:
                made(args, self.grid, threads, shared_bytes)

        return Launch()
