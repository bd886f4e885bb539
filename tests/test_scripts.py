"""scripts/test-gpu, with programs in place of Python and compute-sanitizer that do as they are told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "test-gpu"


def run(
    tmp_path: Path, *arguments: str, tests: dict[str, int] | None = None, sanitizer: dict[str, int] | None = None,
    parallel: str = "",
) -> tuple[int, str]:  # fmt: skip
    """Exit status and output, with exit statuses given for pytest by its marker expression and for each of the
    sanitizer's tools and files; ``parallel`` is what the script learns of pytest-xdist."""
    python = tmp_path / "python"
    cases = "".join(f'"{marker}") exit {code};; ' for marker, code in (tests or {}).items())
    python.write_text(
        f'#!/bin/sh\n[ "$1" = - ] && echo "{parallel}" && exit 0\necho "python $*"\ncase $5 in {cases} esac\n'
    )
    python.chmod(0o755)
    if sanitizer is not None:
        tool = tmp_path / "compute-sanitizer"
        cases = "".join(f'"{key}") exit {code};; ' for key, code in sanitizer.items())
        name = 'case "$2 $(basename "$6" .py)" in'
        tool.write_text(f'#!/bin/sh\necho "$* caching=$PYTORCH_NO_CUDA_MEMORY_CACHING"\n{name} {cases} esac\n')
        tool.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"
    done = subprocess.run(
        [str(SCRIPT), *arguments], env={"PATH": path, "PYTHON": str(python)}, capture_output=True, text=True
    )
    return done.returncode, done.stdout


ALL = ("memcheck sanitized_triton", "memcheck sanitized_cuda", "racecheck sanitized_triton", "racecheck sanitized_cuda")


def test_all_passed(tmp_path: Path) -> None:
    code, output = run(tmp_path, sanitizer={}, parallel="-n 8")
    assert code == 0
    lines = output.splitlines()
    assert lines[:3] == [
        "python -m pytest -q -m gpu and not slow -n 8",
        "python -m pytest -q -m gpu and slow",
        "python -m pytest -q -m not gpu tests/contract",
    ]
    for line, which in zip(lines[3:7], ALL, strict=True):
        tool, file = which.split()
        assert line.startswith(f"--tool {tool} --error-exitcode 9 ")
        assert line.endswith(f"tests/support/{file}.py caching=1")
    passed = ", ".join(f"{name} passed" for name in ("tests", "measured", "contract", *ALL))
    assert lines[7:] == [f"scripts/test-gpu: {passed}"]


def test_arguments_choose_among_the_tests_that_need_a_gpu(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-k", "two words", sanitizer={}, parallel="-n 8")
    assert code == 0
    assert output.splitlines()[0] == "python -m pytest -q -m gpu -k two words"
    assert output.splitlines()[-1].startswith("scripts/test-gpu: tests passed, memcheck sanitized_triton passed")


@pytest.mark.parametrize(
    ("tests", "sanitizer", "failed"),
    [
        ({"gpu and not slow": 1}, {}, {"tests": 1}),
        ({"gpu and slow": 2}, {}, {"measured": 2}),
        ({"not gpu": 5}, {}, {"contract": 5}),
        ({}, {ALL[0]: 9}, {ALL[0]: 9}),
        ({}, {ALL[3]: 9}, {ALL[3]: 9}),
        ({"gpu and not slow": 5}, {ALL[1]: 1, ALL[2]: 1}, {"tests": 5, ALL[1]: 1, ALL[2]: 1}),
    ],
)
def test_what_failed_is_named(
    tmp_path: Path, tests: dict[str, int], sanitizer: dict[str, int], failed: dict[str, int]
) -> None:
    code, output = run(tmp_path, tests=tests, sanitizer=sanitizer)
    assert code == 1
    named = ("tests", "measured", "contract", *ALL)
    said = ", ".join(f"{name} FAILED ({failed[name]})" if name in failed else f"{name} passed" for name in named)
    assert output.splitlines()[-1] == f"scripts/test-gpu: {said}"


@pytest.mark.skipif(Path("/usr/local/cuda/bin/compute-sanitizer").exists(), reason="compute-sanitizer is installed")
def test_without_a_sanitizer_it_says_so(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert code == 0
    assert "no compute-sanitizer here: memory and races not checked" in output.splitlines()[-1]
