"""An extension of griffe, which reads docstrings for the site: roles of Sphinx become links of Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):`(~?)([\w.]+)`")


def markdown(text: str) -> str:
    """A docstring with links in place of roles, which stay plain code where the site lacks their target; and without
    the second colon of ``::``, since an indented block is code in Markdown anyway."""

    def link(match: re.Match[str]) -> str:
        path = match[2]
        name = path.rpartition(".")[2] if match[1] else path
        return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'

    return re.sub(r"::$", ":", _ROLE.sub(link, text), flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
