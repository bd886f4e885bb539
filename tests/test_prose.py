"""Plain English, where a machine can tell: words that puzzle a stranger do not appear in code and documentation."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

AVOID = {
    r"wants?": "expects, needs or requires",
    r"bring(s|ing|ers?)?|brought": "loads, copies, installs or contains",
    r"(?<!streaming )multiprocessors?": "SM",
    r"matrix units?": "tensor cores",
    r"to the bit": "bitwise identical, batch-invariant, exact",
    r"takes? turns|in turns|by turns": "alternates",
    r"goes on|go on|went on": "continues",
    r"what (it|that|this) is|is what it": "name the thing",
    r"made anew|anew": "again",
    r"at hand": "present, available",
    r"(that|which|line|it) (is|are) (?-i:none)": "is not a ...",
    r"(?<!there )is no (?!more|longer|such|less|limit)\w+": "is not a ...",
    r"whoever": "name the user or the code",
    r"by name only": "opt-in",
    r"(scales?|bytes|columns|lanes) a (row|token|lane|matrix|stage)": "per row, per token",
    r"rightly": "correctly",
    r"mended": "fixed",
    r"(do|does|did) not come to": "does not reach",
    r"for want of": "because there is no ...",
    r"hopper(?=[`'\"]? (takes|runs|refuses|does))": "cuda",
}
"""What to avoid, as regular expressions over whole words, with what to write instead."""

ALLOWED = {
    "src/polymoe/common/backend_names.py": {"hopper"},
    "src/polymoe/bench/serving/prompts.py": {"want"},  # words of prompts
}
"""Words that a file needs, for quoting."""


def files() -> list[str]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found += [path for folder in ("examples", "models") for path in (ROOT / folder).glob("*.py")]
    for suffix in ("py", "cu", "cuh", "h"):
        found += (ROOT / "src").rglob(f"*.{suffix}")
    return sorted(str(path.relative_to(ROOT)) for path in found)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and text: comments and strings of Python and C++, everything of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = tokenize.tok_name[token.type]
            if kind == "COMMENT" or kind == "STRING" or kind == "FSTRING_MIDDLE":
                for i, line in enumerate(token.string.splitlines()):
                    yield token.start[0] + i, line
    elif path.suffix in (".cu", ".cuh", ".h"):
        for number, line in enumerate(text.splitlines(), 1):
            yield number, "".join(re.findall(r"//.*|/\*.*?\*/|\"[^\"]*\"", line))
    else:
        yield from enumerate(text.splitlines(), 1)


def stumbles(path: Path, allowed: frozenset[str] = frozenset()) -> list[str]:
    """What a file says in words to avoid, with what to write instead."""
    found = []
    for number, line in prose(path):
        for word, instead in AVOID.items():
            for match in re.finditer(rf"\b(?:{word})\b", line, flags=re.IGNORECASE):
                if match[0].lower() not in allowed:
                    found.append(f"{path.name}:{number}: {match[0]!r}: write {instead}: {line.strip()}")
    return found


@pytest.mark.parametrize("name", files())
def test_words(name: str) -> None:
    found = stumbles(ROOT / name, frozenset(ALLOWED.get(name, ())))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("a.py", '"""It wants a tensor."""\nwants = bring = 1  # and the matrix units\n', ["wants", "matrix units"]),
        ("a.py", 'x = f"equal {y} to the bit"\n', ["to the bit"]),
        ("a.cuh", "bring(x);  // brings x\nint multiprocessor;\n", ["brings"]),
        ("a.md", "streaming multiprocessor, one a multiprocessor\n\nIt goes on.\n", ["multiprocessor", "goes on"]),
        ("a.md", "One scale a row, per lane. Some columns: a row.\n", ["scale a row"]),
        ("a.md", "There is no GPU. It is no longer so, and a wanted poster turns green in turn.\n", []),
    ],
)
def test_what_is_found(file: str, text: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    said = stumbles(tmp_path / file)
    assert [line.split("'")[1] for line in said] == found
