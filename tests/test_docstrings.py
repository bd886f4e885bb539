"""Every public name says what it is, and every ``__all__`` is true."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import polymoe

ROOT = Path(polymoe.__file__).parent
MODULES = sorted(p for p in ROOT.rglob("*.py") if "kernels" not in p.parts)  # device code needs its compiler to import


def name_of(path: Path) -> str:
    return ".".join(["polymoe", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


def undocumented(source: str, module: object) -> list[str]:
    """Names in the module's ``__all__`` that its source defines and does not document: functions, classes, their
    public methods (a base class may say what they do), constants."""
    missing, tree = [], ast.parse(source)
    following = [*tree.body[1:], None]
    public = getattr(module, "__all__", ())
    for node, after in zip(tree.body, following, strict=True):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in public:
            missing += [] if ast.get_docstring(node) else [node.name]
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    said = inspect.getdoc(getattr(getattr(module, node.name), method.name))
                    missing += [] if said else [f"{node.name}.{method.name}"]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            missing += [t.id for t in targets if isinstance(t, ast.Name) and t.id in public and not said]
    return missing


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_public_names_are_documented(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), "the module has no docstring"
    if "__all__ =" not in source:
        return  # an entry point or a package's marker: nothing is public
    try:
        module = importlib.import_module(name_of(path))
    except ImportError as error:
        if (error.name or "").startswith("polymoe"):
            raise
        pytest.skip(f"an extra that is not installed here: {error}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert undocumented(source, module) == []


def test_the_package_exports_what_it_says() -> None:
    assert polymoe.__all__ == sorted(polymoe.__all__)
    for name in polymoe.__all__:
        assert inspect.getdoc(getattr(polymoe, name)), name
        assert name in dir(polymoe)


def test_the_walk_notices_what_is_missing() -> None:
    class Module:
        __all__ = ("C", "X", "Y", "f")

        class C:
            def m(self) -> None: ...

    source = "X = 1\ndef f(): ...\nclass C:\n    'said'\n    def m(self): ...\n    def _p(self): ...\nY = 2\n'''said'''"
    assert undocumented(source, Module) == ["X", "f", "C.m"]
