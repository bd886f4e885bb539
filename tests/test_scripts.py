"""scripts/test-gpu, with programs in place of Python and compute-sanitizer that do as they are told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "test-gpu"


def run(tmp_path: Path, *arguments: str, tests: int = 0, sanitizer: dict[str, int] | None = None) -> tuple[int, str]:
    """Exit status and output, with exit statuses given for pytest and for each of the sanitizer's tools."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = - ] && exit 0\necho "python $*"\nexit {tests}\n')
    python.chmod(0o755)
    if sanitizer is not None:
        cases = "".join(f"{tool}) exit {code};; " for tool, code in sanitizer.items())
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(f'#!/bin/sh\necho "$* caching=$PYTORCH_NO_CUDA_MEMORY_CACHING"\ncase $2 in {cases} esac\n')
        tool.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"
    done = subprocess.run(
        [str(SCRIPT), *arguments], env={"PATH": path, "PYTHON": str(python)}, capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_all_passed(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-k", "two words", sanitizer={"memcheck": 0, "racecheck": 0})
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "python -m pytest -m not slow or gpu -k two words"
    for line, tool in zip(lines[1:3], ("memcheck", "racecheck"), strict=True):
        assert line.startswith(f"--tool {tool} --error-exitcode 9 ")
        assert line.endswith("tests/kernels/sanitized.py caching=1")
    assert lines[3:] == ["scripts/test-gpu: tests passed, memcheck passed, racecheck passed"]


@pytest.mark.parametrize(
    ("tests", "sanitizer", "summary"),
    [
        (1, {"memcheck": 0, "racecheck": 0}, "tests FAILED (1), memcheck passed, racecheck passed"),
        (0, {"memcheck": 9, "racecheck": 0}, "tests passed, memcheck FAILED (9), racecheck passed"),
        (0, {"memcheck": 0, "racecheck": 9}, "tests passed, memcheck passed, racecheck FAILED (9)"),
        (5, {"memcheck": 1, "racecheck": 1}, "tests FAILED (5), memcheck FAILED (1), racecheck FAILED (1)"),
    ],
)
def test_what_failed_is_named(tmp_path: Path, tests: int, sanitizer: dict[str, int], summary: str) -> None:
    code, output = run(tmp_path, tests=tests, sanitizer=sanitizer)
    assert code == 1
    assert output.splitlines()[-1] == f"scripts/test-gpu: {summary}"


@pytest.mark.skipif(Path("/usr/local/cuda/bin/compute-sanitizer").exists(), reason="compute-sanitizer is installed")
def test_without_a_sanitizer_it_says_so(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert code == 0
    assert "no compute-sanitizer here: memory and races not checked" in output.splitlines()[-1]
