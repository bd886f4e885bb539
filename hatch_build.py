"""The parts of the package's metadata that need the address of the repository, while a wheel or an sdist is built.

README links to files of the repository, which a package index does not have. ``repository`` in pyproject.toml,
``[tool.hatch.metadata.hooks.custom]``, is the one place that names their address; while it is empty, links stay as they
are and there are no URLs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_TARGET = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?![a-z]+:|#)([^)\s]+)\)")
"""A link or a picture whose target is a file of the repository."""


def absolute(text: str, repository: str) -> str:
    """Return Markdown whose links and pictures lead to the repository; the same text without its address."""

    def replaced(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        label = _TARGET.sub(replaced, label)  # a picture within a link
        return f"{picture}{label}{repository.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"

    return _TARGET.sub(replaced, text) if repository else text


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata of the project."""
        repository = self.config["repository"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, repository)}
        metadata["urls"] = {"Repository": repository, "Issues": f"{repository}/issues"} if repository else {}
