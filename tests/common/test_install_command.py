"""Hints, scripts and documents name a command that installs polymoe today: all the same one."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from polymoe.common.install_command import install_command, install_hint, packages_of
from polymoe.errors import MissingDependency

ROOT = Path(__file__).parents[2]
SOURCES = [path for path in sorted((ROOT / "src").rglob("*.py")) if path.name != "install_command.py"]
FILES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "scripts" / "demo", *SOURCES]
SECTION = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
EXTRAS = re.findall(r"^([\w-]+) = \[", SECTION.partition("\n[")[0], re.MULTILINE)
COMMANDS = tuple(install_command(extra) for extra in ("", *EXTRAS))


def test_today_it_is_a_clone() -> None:
    assert install_command("serve") == "pip install -e '.[serve]'"
    assert install_hint("bench") == "in a clone of polymoe: pip install -e '.[bench]'"
    assert set(EXTRAS) >= {"transformers", "serve", "bench", "vllm", "sglang"}


def test_a_missing_package_is_named_with_its_extra() -> None:
    said = "a server: expected the packages of the extra 'serve', got No module named 'no_such_module'"
    with pytest.raises(MissingDependency, match=re.escape(said)), packages_of("serve", "a server"):
        import no_such_module  # noqa: F401  # pyright: ignore


def test_an_installed_wheel_names_the_packages_of_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no clone to install from, and no release whose extra pip could find."""
    monkeypatch.setattr("polymoe.common.install_command._CLONE", tmp_path)
    requires = [
        "torch>=2.11", 'transformers>=5.16; extra == "transformers"', "polymoe[transformers] ; extra == 'serve'",
        'fastapi>=0.115; extra == "serve"',
    ]  # fmt: skip
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    assert install_hint("serve") == "for the extra 'serve': pip install 'transformers>=5.16' 'fastapi>=0.115'"


def test_polymoe_that_is_only_on_the_path_names_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("polymoe.common.install_command._CLONE", tmp_path)

    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", requires)
    assert install_hint("serve") == "in a clone of polymoe: pip install -e '.[serve]'"


def test_every_file_names_this_command() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text[place : place + 40]!r}"
        for path in FILES
        for text in [path.read_text(encoding="utf-8")]
        for place in (match.start() for match in re.finditer("pip install", text))
        if not text.startswith(COMMANDS, place)
    ]
    assert not found, "\n".join(found)


def test_hints_name_extras_that_exist() -> None:
    uses = re.compile(r'(?:install_hint|packages_of)\("([^"]*)"')
    named = {name for path in SOURCES for name in uses.findall(path.read_text("utf-8"))}
    assert named == {"bench", "serve", "transformers"}
    assert named <= set(EXTRAS)
