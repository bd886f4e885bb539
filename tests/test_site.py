"""The documentation site: generated pages, links between the repository and the site, and what it must contain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import site_pages

import polymoe

ROOT = Path(__file__).parents[1]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_command_and_option_has_its_row() -> None:
    text = site_pages.commands_page()
    found = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert found[0] == "polymoe explain"
    assert {"polymoe bench kernels", "polymoe bench serve", "polymoe doctor"} <= set(found)
    part = text.partition("## polymoe explain\n")[2].partition("\n## ")[0]
    assert "| <code>--device &lt;str&gt;</code> |" in part
    assert "| <code>--role &lt;mixed&#124;decode&#124;prefill&gt;</code> |" in part  # no bar ends the cell
    assert "$ polymoe explain openai/gpt-oss-120b --device 'RTX 4090' --tp 8" in part
    assert part.count("\n| <code>") >= 8
    assert not re.search(r"^\|.*[^\\]\[default", part, re.MULTILINE)  # brackets would be links


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[a](docs/serving.md#limits)", "[a](serving.md#limits)"),
        ("serving.md", "[a](../README.md#gpus)", "[a](index.md#gpus)"),
        ("engines/vllm.md", "[a](../security.md)", "[a](../security.md)"),
        ("engines/vllm.md", "[a](../../SECURITY.md)", "[a](../security-policy.md)"),
        ("examples.md", "[a](../docs/tuning.md)", "[a](tuning.md)"),
        ("examples.md", "[chat.py](chat.py)", "`examples/chat.py`"),
        ("index.md", "![plot](docs/a.png)", "![plot](a.png)"),
        ("serving.md", "[a](#limits) [b](https://x.org/y)", "[a](#limits) [b](https://x.org/y)"),
        ("performance/method.md", "[`cost.py`](../../src/polymoe/backends/cost.py)", "`src/polymoe/backends/cost.py`"),
        ("performance/method.md", "[records](../../benchmarks/results)", "records (`benchmarks/results`)"),
        ("serving.md", "```python\nx[0](../y)\n```\n", "```python\nx[0](../y)\n```\n"),
    ],
)
def test_links(page: str, link: str, expected: str) -> None:
    assert site_pages.linked(link, page) == expected


def test_every_page_is_in_the_navigation() -> None:
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = docs | set(site_pages.ROOT_PAGES.values()) | set(site_pages.GENERATED)
    assert set(re.findall(r": ([\w/-]+\.md)$", CONFIG, re.MULTILINE)) == pages
    assert all((ROOT / source).exists() for source in site_pages.ROOT_PAGES)


def test_every_public_name_is_on_the_page_of_python() -> None:
    text = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    named = {path.removeprefix("polymoe.") for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert {name for name in polymoe.__all__ if name not in named and name != "formats"} == set()
