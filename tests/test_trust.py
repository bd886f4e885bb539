"""No code of a checkpoint runs: every call that loads something in Transformers says ``trust_remote_code=False``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "models", "benchmarks", "tests", "examples", "scripts", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
LOADS = ("from_pretrained", "from_config", "pipeline", "get_class_from_dynamic_module", "load_custom_generate")
"""Functions and methods that run code of a checkpoint if they are told, or asked, to trust it."""
NOT_MODELS = ("AutoHfQuantizer", "AutoQuantizationConfig", "peft.PeftConfig", "peft.PeftModel", "peft.PeftMixedModel")
"""Transformers' read a dict; PEFT's read an adapter, which holds no code, and take no ``trust_remote_code``."""


def called(node: ast.Call) -> tuple[str, str]:
    """The function's name and, of a method, that of its object, as far as it is a name."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, ast.unparse(node.func.value)
    return getattr(node.func, "id", ""), ""


def trusting(tree: ast.AST) -> Iterator[int]:
    """Line numbers of calls that load without ``trust_remote_code=False``, or that trust something else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, of = called(node)
            loads = name in LOADS and of not in NOT_MODELS and (name != "pipeline" or of in ("", "transformers"))
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            trust = given.get("trust_remote_code")
            refused = isinstance(trust, ast.Constant) and trust.value is False
            if (loads or trust is not None) and not refused:
                yield node.lineno


def test_no_call_trusts_code() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    spoken = [path for path, text in texts.items() if any(name in text for name in (*LOADS, "trust_remote_code"))]
    assert len(spoken) > 20
    found = {str(path.relative_to(ROOT)): list(trusting(ast.parse(texts[path]))) for path in spoken}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("AutoTokenizer.from_pretrained(path)", [1]),
        ("AutoTokenizer.from_pretrained(path, **options)", [1]),
        ("transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)", [1]),
        ("auto_class(config).from_config(\n  config, dtype=d)", [1]),
        ("pipeline('text-generation', path)", [1]),
        ("transformers.pipeline('text-generation', path)", [1]),
        ("load(path, trust_remote_code=trust)", [1]),
        ("self.family.pipeline(format)", []),
        ("AutoTokenizer.from_pretrained(path, trust_remote_code=False)", []),
        ("AutoHfQuantizer.from_config(source)", []),
    ],
)
def test_what_is_found(code: str, lines: list[int]) -> None:
    assert list(trusting(ast.parse(code))) == lines
