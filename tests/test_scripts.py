"""The scripts that run the tests, with programs in place of Python and other tools that do as they are told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "test-gpu"


def run(
    tmp_path: Path,
    *arguments: str,
    tests: dict[str, int] | None = None,
    sanitizer: dict[str, int] | None = None,
    parallel: str = "",
) -> tuple[int, str]:
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


@pytest.mark.parametrize(
    ("tests", "sanitizer", "failed"),
    [
        ({"not slow": 1}, {}, {"tests": 1}),
        ({"slow": 2}, {}, {"measured": 2}),
        ({"not gpu": 5}, {}, {"contract": 5}),
        ({}, {ALL[0]: 9}, {ALL[0]: 9}),
        ({}, {ALL[3]: 9}, {ALL[3]: 9}),
        ({"not slow": 5}, {ALL[1]: 1, ALL[2]: 1}, {"tests": 5, ALL[1]: 1, ALL[2]: 1}),
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


def test_arguments_choose_tests_and_leave_the_sanitizers_out(tmp_path: Path) -> None:
    code, output = run(tmp_path, "tests/gpu/test_cuda.py", tests={"gpu": 3}, sanitizer={ALL[0]: 9})
    assert code == 1
    called, said = output.splitlines()
    assert called.endswith("-m pytest -q -m gpu tests/gpu/test_cuda.py")
    assert said == "scripts/test-gpu: tests FAILED (3)"


PROGRAM = """#!/bin/sh
said="{name}${*:+ $*}"
echo "$said"
if read -r line; then echo "reads $line"; fi
while read -r code pattern; do
    case $said in
    $pattern) exit "$code" ;;
    esac
done <status
"""
"""Says what it was asked, and exits with the status that the file of that name has for it."""

PARALLEL = "python -m pytest -n logical --maxprocesses 8 --dist worksteal"
COVERAGE = "--cov --cov-report=term:skip-covered --cov-fail-under=90"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts in a directory of their own, with an environment of such programs."""
    scripts = [f"scripts/{name}" for name in ("check", "docs", "env", "test")]
    for name in (*scripts, ".ci/run", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("bin", "transformers-5.17.0", "transformers-5.24.0", "triton-3.6.0", "triton-3.9.0"):
        (tmp_path / ".venv" / folder).mkdir(parents=True)
    for name in ("python", "ruff", "pyright", "clang-format", "mkdocs"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(PROGRAM.replace("{name}", name))
        program.chmod(0o755)
    for folder in ("torch-2.11.0", "clients"):
        shutil.copytree(tmp_path / ".venv/bin", tmp_path / ".venv" / folder / "bin")
        (tmp_path / ".venv" / folder / "installed").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/kernel.cu").touch()
    stamp = "cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1"
    digest = subprocess.run(["sh", "-c", stamp], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    for extra in ("dev", "docs"):
        (tmp_path / f".venv/.installed-{extra}-{digest.strip()}").touch()
    return tmp_path


def run_in(clone: Path, *command: str, status: str = "") -> tuple[int, list[str]]:
    (clone / "status").write_text(status)
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, input="a line\n")
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


ASKED = {
    "tests": "*-m not long*",
    "long tests": "*-m long",
    "transformers 5.17.0": "*worksteal tests/engines tests/problem*",
    "transformers 5.24.0": "*tests/engines/transformers/test_paged*",
    "triton 3.6.0": "*worksteal tests/kernels/test_triton*",
    "torch 2.11.0": "*worksteal --slow none tests/layer*",
    "guidellm and lm-eval": "*worksteal tests/serve/test_guidellm*",
    "triton 3.9.0": "*worksteal --slow none tests/kernels*",
    "the engines' contracts": "*engine_contract*",
    "Transformers' tests": "*transformers_suite*",
}


@pytest.mark.parametrize("failed", [(), *((name,) for name in ASKED), ("tests", "triton 3.6.0")])
def test_all_goes_on_after_a_failure_and_sums_up(clone: Path, failed: tuple[str, ...]) -> None:
    status = "".join(f"3 {ASKED[name]}\n" for name in failed)
    code, output = run_in(clone, "scripts/test", "--all", status=status)
    assert code == bool(failed)
    said = ", ".join(f"{name} {'FAILED (3)' if name in failed else 'passed'}" for name in ASKED)
    assert output[-1] == f"scripts/test --all: {said}"
    assert f"{PARALLEL} -m not long {COVERAGE}" in output


CHECKS = ("ruff check .", "ruff format --check .", "clang-format --dry-run --Werror src/kernel.cu", "pyright")


SITE = "mkdocs build"


@pytest.mark.parametrize("failed", [None, *CHECKS, SITE, f"{PARALLEL} --slow sample"])
def test_ci_runs_checks_the_site_and_tests_and_fails_with_any(clone: Path, failed: str | None) -> None:
    """Whatever fails, the tests run last, and nothing reads what CI's own input holds."""
    code, output = run_in(clone, "bash", ".ci/run", status=f"2 {failed}\n" if failed else "")
    assert code == bool(failed)
    assert output[-1] == f"{PARALLEL} --slow sample"
    last = CHECKS.index(failed) + 1 if failed in CHECKS else len(CHECKS)
    assert output[:-1] == [*CHECKS[:last], SITE]


PIP = """#!/bin/sh
case "$*" in
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip --version") [ -f .venv/bin/python ] ;;
"-m pip install"*)
    echo "Collecting torch==2.13.0"
    echo "  Downloading torch-2.13.0-cp311-none-any.whl.metadata (41 kB)"
    echo "Downloading torch-2.13.0-cp311-none-any.whl (821.5 MB)"
    echo "Downloading idna-3.11-py3-none-any.whl (500 kB)"
    exit STATUS
    ;;
esac
"""


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_says_what_it_downloads(clone: Path, status: int) -> None:
    """And leaves no lock; what went wrong is shown whole, and tried again the next time."""
    shutil.rmtree(clone / ".venv")
    python = clone / "python"
    python.write_text(PIP.replace("STATUS", str(status)))
    python.chmod(0o755)
    command = ["sh", "-c", "extra=dev,docs; . scripts/env; echo ready"]
    environment = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (status, "" if status else "ready\n")
    assert ("  downloaded 2 packages, 822 MB\n" in done.stderr) == (not status)
    assert ("Collecting torch==2.13.0" in done.stderr) == bool(status)
    made = sorted(path.name.split("-")[1] for path in (clone / ".venv").glob(".installed-*"))
    assert made == ([] if status else ["dev", "docs"])
    assert not (clone / ".venv.lock").exists()
