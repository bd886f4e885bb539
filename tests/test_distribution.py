"""The wheel and the sdist: contents, metadata, and that a fresh environment with the declared packages runs them.

The environment has no packages but the wheel's and, as links, those of this one that the wheel's requirements name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import polymoe

ROOT = Path(__file__).parents[1]
SUMS = ROOT / "models/sums-gpt-oss-mxfp4"
EXTRAS = re.findall(
    r"^([\w-]+) = \[",
    (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]\n")[2].partition("\n[")[0],
    re.MULTILINE,
)


def build(source: Path, target: Path, *options: str) -> list[Path]:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(target), *options]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(target.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of this tree."""
    sdist, wheel = sorted(build(ROOT, tmp_path_factory.mktemp("dist")), key=lambda path: path.suffix == ".whl")
    return wheel, sdist


def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if not name.endswith("/")}


def package_files() -> set[str]:
    files = (path for path in (ROOT / "src/polymoe").rglob("*") if path.is_file())
    found = {path.relative_to(ROOT / "src").as_posix() for path in files if path.suffix != ".pyc"}
    return found | {f"polymoe/demo/{path.name}" for path in SUMS.iterdir()}


@pytest.mark.slow
def test_contents(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    names = in_wheel(wheel)
    assert wheel.stat().st_size < 6e6
    info = f"polymoe-{polymoe.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == package_files()
    assert {
        f"{info}{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    } <= names
    assert "polymoe/py.typed" in names
    assert any(name.endswith(".tar.xz") for name in names)
    with tarfile.open(sdist) as file:
        if hasattr(tarfile, "data_filter"):  # not in Python before 3.11.4 and 3.10.12
            file.extraction_filter = tarfile.data_filter
        file.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    assert {"pyproject.toml", "PKG-INFO", "README.md", "CHANGELOG.md", "LICENSE", "src", "docs", "models"} <= set(
        os.listdir(source)
    )
    assert not (source / "tests").exists()
    (again,) = build(source, tmp_path / "dist", "--target", "wheel")
    assert in_wheel(again) == names


@pytest.mark.slow
def test_metadata(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[0]) as file:
        file.extractall(tmp_path)
    (info,) = tmp_path.glob("*.dist-info")
    found = metadata.PathDistribution(info)
    assert found.version == polymoe.__version__
    assert found.metadata["Requires-Python"] == ">=3.10"
    assert set(found.metadata.get_all("Provides-Extra") or ()) == set(EXTRAS)
    assert {(point.group, point.name) for point in found.entry_points} == {
        ("console_scripts", "polymoe"), ("sglang.srt.plugins", "polymoe"), ("vllm.general_plugins", "polymoe"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("twine") is None, reason="twine is not installed")
def test_twine_finds_nothing(built: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def required(requirements: list[str], extra: str, found: dict[tuple[str, str], metadata.Distribution]) -> None:
    """Add the distributions that requirements name, by name and extra, and those that they require, to ``found``."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for inner in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), inner)
            if key not in found:
                found[key] = metadata.distribution(requirement.name)
                required(found[key].requires or [], inner, found)


def fresh(folder: Path, wheel: Path, extra: str) -> Path:
    """An environment with the wheel and the packages that it requires; returns the folder of its programs."""
    venv.create(folder, symlinks=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    command = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", "--disable-pip-version-check", str(wheel)], check=True, timeout=300)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        header = file.read(name).decode().partition("\n\n")[0]
    found: dict[tuple[str, str], metadata.Distribution] = {}
    required(re.findall(r"^Requires-Dist: (.*)$", header, re.MULTILINE), extra, found)
    for path in files_of(found.values()):
        if not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return programs


def files_of(distributions: Iterable[metadata.Distribution]) -> Iterator[Path]:
    """What distributions have at the top of site-packages."""
    for distribution in distributions:
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        yield from (Path(str(distribution.locate_file(top))) for top in sorted(tops))


def said(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_explains_and_verifies_with_the_packages_that_it_requires(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    programs = fresh(tmp_path / "fresh", built[0], extra="")
    where = said(programs / "python", "-c", "import polymoe; print(polymoe.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    look = "import importlib.util as u; print(u.find_spec('transformers'), u.find_spec('torch') is not None)"
    assert said(programs / "python", "-c", look, cwd=tmp_path) == "None True\n"
    assert "fits on h200" in said(
        programs / "polymoe", "explain", "openai/gpt-oss-20b", "--device", "h200", cwd=tmp_path
    )
    assert "reference" in said(programs / "polymoe", "verify", SUMS, "--layer", "1", cwd=tmp_path)
    assert "reference" in said(programs / "polymoe", "verify", "demo", "--layer", "1", cwd=tmp_path)


@pytest.mark.slow
def test_the_wheel_runs_a_model_with_the_extra_transformers(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = fresh(tmp_path / "fresh", built[0], extra="transformers")
    assert "579" in said(programs / "polymoe", "run", SUMS, "123+456=", "--device", "cpu", cwd=tmp_path)
    assert "579" in said(programs / "polymoe", "run", "demo", "123+456=", "--device", "cpu", cwd=tmp_path)


def test_the_newest_changes_are_those_of_this_version() -> None:
    first = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0]
    assert first.rstrip(",") == polymoe.__version__


def test_versions_of_python() -> None:
    """Classifiers name each version from the oldest that is accepted."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    minors = [int(minor) for minor in re.findall(r'Python :: 3\.(\d+)"', text)]
    assert minors == list(range(10, 15))
    assert 'requires-python = ">=3.10"' in text


def test_forms_for_issues_name_files_that_exist() -> None:
    forms = ROOT / ".github/ISSUE_TEMPLATE"
    text = (forms / "bug.yml").read_text("utf-8") + (forms / "gpu-record.yml").read_text("utf-8")
    assert text.count("Output of polymoe doctor") == 2
    for name in re.findall(r"(?:scripts/[\w-]+|SECURITY\.md)", text):
        assert (ROOT / name).exists(), name
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    assert copied
    assert all((ROOT / name).exists() for names in copied for name in names.split())


@pytest.fixture
def hook() -> Any:
    spec = util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "absolute"),
    [
        ("[a](docs/a.md#b)", "[a](https://host/o/r/blob/main/docs/a.md#b)"),
        ("![p](docs/p.png)", "![p](https://host/o/r/raw/main/docs/p.png)"),
        ("[![p](p.png) `x[0]`](LICENSE)", "[![p](https://host/o/r/raw/main/p.png) `x[0]`](https://host/o/r/blob/main/LICENSE)"),
        ("[a](https://b/c) [d](#e) [f](mailto:g)", "[a](https://b/c) [d](#e) [f](mailto:g)"),
    ],
)  # fmt: skip
def test_links_become_absolute(text: str, absolute: str, hook: Any) -> None:
    assert hook.absolute(text, "https://host/o/r/") == absolute
    assert hook.absolute(text, "") == text


def test_no_link_of_readme_is_left_out(hook: Any) -> None:
    text = hook.absolute((ROOT / "README.md").read_text(encoding="utf-8"), "https://host/o/r")
    assert text.count("https://host/o/r/blob/main/") > 30
    assert not [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?://|#", target)]


@pytest.mark.slow
def test_the_address_of_the_repository_is_one_constant(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    package, demo = tmp_path / "src" / "polymoe", tmp_path / "models" / SUMS.name
    package.mkdir(parents=True)
    demo.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0"\n')
    project = tmp_path / "pyproject.toml"
    for address in ("", "https://host/o/r"):
        text = re.sub(
            r'^repository = "[^"]*"', f'repository = "{address}"', project.read_text("utf-8"), flags=re.MULTILINE
        )
        project.write_text(text, "utf-8")
        (wheel,) = build(tmp_path, tmp_path / f"dist{bool(address)}", "--target", "wheel")
        with zipfile.ZipFile(wheel) as file:
            found = file.read("polymoe-0.dist-info/METADATA").decode()
        assert ("Project-URL: Repository, https://host/o/r" in found) == bool(address)
        assert ("](docs/" in found) != bool(address)
