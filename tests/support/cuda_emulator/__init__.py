"""The Hopper kernels' sources, compiled for the CPU that runs the tests: see ``cuda.h``."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from polymoe.kernels.cuda import compiled

HERE = Path(__file__).parent
SOURCES = Path(compiled.__file__).parent
ARGS = {
    "rows": ("DispatchArgs", "SpreadArgs", "CombineArgs"), "rows_fp8": ("QuantizeArgs",),
    "fp8_block128": ("GemmArgs", "QuantizeRowsArgs"), "w8a8_fp8_block128": ("GemmArgs", "QuantizeRowsArgs"),
}  # fmt: skip

STRUCTS = {
    "PermutationArgs": "DispatchArgs", "PermuteArgs": "SpreadArgs", "QuantizePermutedArgs": "QuantizeArgs",
    "FinalizeArgs": "CombineArgs",
}  # fmt: skip
"""Structures of the sources, by the launchers' names of them."""


def compile_unit(unit: str, folder: Path) -> ctypes.CDLL:
    """One of the kernels' source files as a shared library."""
    files = {path.name: path.read_text() for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"))}
    return compile_files(files, f"{unit}.cu", ARGS.get(unit, ("GemmArgs",)), folder, unit)


def compile_files(files: dict[str, str], unit: str, args: tuple[str, ...], folder: Path, name: str) -> ctypes.CDLL:
    """A source file among others, with asynchronous copies, barriers and products emulated.

    Args:
        files: texts by name.
        unit: the name of the one to compile.
        args: structures that its kernels take.
        folder: for what is written.
        name: of the library.
    """
    inside = folder / name
    inside.mkdir(exist_ok=True)
    for file, text in files.items():
        (inside / file).write_text(text.replace("extern __shared__", "extern").replace("__shared__", "static"))
    for path in HERE.glob("*.*h"):
        shutil.copy(path, inside)
    calls = "".join(f"POLYMOE_CALL({struct})\n" for struct in args)
    source, target = inside / f"{name}.cpp", inside / f"{name}.so"
    source.write_text(f'#include "cuda.h"\n#include "{unit}"\n{calls}')
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-w", "-o", target, source], check=True)
    library = ctypes.CDLL(str(target))
    library.emulate.restype = ctypes.c_char_p
    return library


class Emulator:
    """Takes the place of ``compiled.kernel``: kernels run here and now, on the CPU."""

    def __init__(
        self, libraries: dict[str, ctypes.CDLL], tensors: list[Any], seed: int = 0, coarse: bool = False
    ) -> None:
        """``coarse``: e4m3 products are added as Hopper does, not exactly."""
        for library in libraries.values():
            library.set_coarse(coarse)
        self.libraries, self.seed, self.made = libraries, seed, []
        flat = [v for t in tensors for v in (t.data_ptr(), t.numel() * t.element_size())]
        self.ranges = (ctypes.c_long * len(flat))(*flat)

    def __call__(self, unit: str, name: str) -> Any:
        """A kernel by its name, whose prepared launches run when they are called."""
        library = self.libraries[unit]

        def call(args: ctypes.Structure, grid: Any, threads: int, shared: int = 0) -> None:
            self.seed += 1
            self.made.append(name)
            struct = type(args).__name__
            struct = STRUCTS.get(struct, struct)
            grid = (*grid, 1)[:2]
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            error = library.emulate(
                getattr(library, f"call_{struct}"), address, ctypes.byref(args), *grid, threads, shared, self.seed,
                self.ranges, len(self.ranges) // 2,
            )  # fmt: skip
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
