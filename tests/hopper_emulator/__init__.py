"""The Hopper kernels' sources, compiled for the CPU that runs the tests: see ``cuda.h``."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from polymoe.kernels.hopper import compiled

HERE = Path(__file__).parent
SOURCES = Path(compiled.__file__).parent
ARGS = {"rows": ("DispatchArgs", "SpreadArgs", "CombineArgs")}


def compile_unit(unit: str, folder: Path) -> ctypes.CDLL:
    """One source file as a shared library, with asynchronous copies, barriers and products emulated."""
    for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")):
        text = path.read_text().replace("extern __shared__", "extern").replace("__shared__", "static")
        (folder / path.name).write_text(text)
    for path in HERE.glob("*.*h"):
        shutil.copy(path, folder)
    calls = "".join(f"POLYMOE_CALL({args})\n" for args in ARGS.get(unit, ("GemmArgs",)))
    source = folder / f"{unit}.cpp"
    source.write_text(f'#include "cuda.h"\n#include "{unit}.cu"\n{calls}')
    target = folder / f"{unit}.so"
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-w", "-o", target, source]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target))
    library.emulate.restype = ctypes.c_char_p
    return library


class Emulator:
    """Takes the place of ``launch.kernel``: kernels run here and now, on the CPU."""

    def __init__(self, libraries: dict[str, ctypes.CDLL], tensors: list[Any], seed: int = 0) -> None:
        self.libraries, self.seed, self.made = libraries, seed, []
        flat = [v for t in tensors for v in (t.data_ptr(), t.numel() * t.element_size())]
        self.ranges = (ctypes.c_long * len(flat))(*flat)

    def __call__(self, unit: str, name: str) -> Any:
        """A kernel by its name."""
        library = self.libraries[unit]

        def call(args: ctypes.Structure, grid: Any, threads: int, shared: int = 0) -> None:
            self.seed += 1
            self.made.append(name)
            struct = f"{type(args).__name__.removeprefix('_')}Args"
            grid = (*grid, 1)[:2]
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            error = library.emulate(
                getattr(library, f"call_{struct}"), address, ctypes.byref(args), *grid, threads, shared, self.seed,
                self.ranges, len(self.ranges) // 2,
            )  # fmt: skip
            assert error is None, f"{name}: {error.decode()}"

        return call
