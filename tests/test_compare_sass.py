"""scripts/compare-sass tells machine code that changed from machine code that did not."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.build import archive
from polymoe.kernels.cuda.targets import SM90

SCRIPT = Path(__file__).parents[1] / "scripts/compare-sass"
PROLOGUE = struct.pack("<Q", 0x00000A00FF017B82)
"""``LDC R1, c[0x0][0x28]``, the first instruction of every kernel, without what the scheduler adds to it."""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with one and the same cubin."""
    pytest.importorskip("triton")
    cubin = modules.read_cubin("finalize", SM90)
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "around.tar.xz").write_bytes(archive({f"{side}_unit.{side}hash.cubin": cubin}))
    return tmp_path / "old", tmp_path / "new"


def compare(*args: object) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_equal_code_under_other_names(folders: tuple[Path, Path], tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("# units have been renamed\nold_(\\w+)/(\\w+)  new_\\1/\\2\n")
    code, said = compare(*folders, "--names", names)
    assert code == 0, said
    assert "3 kernels before, 3 now: 0" in said


def test_a_kernel_that_one_side_lacks(folders: tuple[Path, Path]) -> None:
    code, said = compare(*folders)
    assert code == 1
    assert f"old_unit/finalize_f32: only in {folders[0]}" in said
    assert f"new_unit/finalize_f32: only in {folders[1]}" in said


def test_one_other_instruction(folders: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = folders
    (path,) = new.iterdir()
    code = modules.read_cubin("finalize", SM90)
    assert code.count(PROLOGUE) == 3
    other = PROLOGUE.replace(b"\x01", b"\x02", 1)  # R2
    path.unlink()
    (new / "old_unit.cubin").write_bytes(code.replace(PROLOGUE, other, 1))
    status, said = compare(old, new)
    assert status == 1
    assert said.count("differs from line") == 1
    assert "3 kernels before, 3 now: 1" in said
    assert "LDC R2" in compare(old, new, "--diff")[1]


def test_wrong_usage(tmp_path: Path) -> None:
    assert compare(tmp_path)[0] == 2
    (tmp_path / "names").write_text("one two three\n")
    pytest.importorskip("triton")
    assert compare(tmp_path, tmp_path)[0] != 0  # no cubins
