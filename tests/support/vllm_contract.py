"""What vLLM's sources say of the names that the plug-in uses, by version: ``tests/engines/vllm/contract.json``.

``python tests/support/vllm_contract.py`` downloads the wheels of the oldest version that works, of one between and of
the newest, reads their Python files without installing them, and writes the table. With ``--check`` it changes nothing,
and fails if the table differs.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polymoe.engines.serving.sources import VLLM
from polymoe.engines.vllm.hooks import HOOKS, Hook

TABLE = Path(__file__).parents[1] / "engines" / "vllm" / "contract.json"
VERSIONS = ("0.24.0", "0.26.0", "")
"""The last one is the newest."""

_LAYERS = "vllm/model_executor/layers/"
_ORACLES = f"{_LAYERS}fused_moe/oracle/"
_CONSTRUCTION = ("_get_quant_method", "maybe_roundup_sizes", "supports_eplb", "create_weights")
_COUNTING = ("load_numel_total", "get_numel_loaded", "load_numel", "_layerwise_process")

Sources = Mapping[str, ast.Module]


def contract(sources: Sources) -> dict[str, Any]:
    """What one version has.

    Returns:
        ``hooks``: parameters of functions and attributes of classes; ``methods``: names of the parameters that each
        method of :data:`~polymoe.engines.serving.sources.VLLM` creates, ``{}`` for computed parts; ``selectors``: the
        functions that choose backends, and their enumerations; ``order``: what ``RoutedExperts.__init__`` asks its
        method for, and what counts the loaded elements, in the order of the source.
    """
    classes = {node.name: node for name, tree in sources.items() if name.startswith(_LAYERS) for node in _classes(tree)}
    created = _find(sources, f"{_LAYERS}fused_moe/routed_experts.py", "RoutedExperts.__init__")
    loaded = _find(sources, "vllm/model_executor/model_loader/reload/layerwise.py", "make_online_process_loader")
    return {
        "hooks": {str(hook): _hook(sources, hook) for hook in HOOKS},
        "methods": {name: _registered(classes[name]) for name in VLLM if name in classes},
        "selectors": dict(sorted(_selectors(sources))),
        "order": {
            "RoutedExperts.__init__": _order(created, _CONSTRUCTION),
            "make_online_process_loader": _order(loaded, _COUNTING),
        },
    }


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _find(sources: Sources, file: str, name: str) -> Any:
    """A class, a function, or a method with its last definition: those before it only declare types."""
    found: Any = sources.get(file)
    for part in name.split("."):
        named = [n for n in getattr(found, "body", ()) if getattr(n, "name", None) == part]
        if not named:
            return None
        found = named[-1]
    return found


def _hook(sources: Sources, hook: Hook) -> list[str] | None:
    path = hook.module.replace(".", "/")
    for file in (f"{path}.py", f"{path}/__init__.py"):
        node = _find(sources, file, hook.name)
        if isinstance(node, ast.ClassDef):
            return sorted(set(_attributes(node)))
        if node is not None:
            arguments = node.args
            return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if file in sources and hook.name in _exported(sources[file]):
            return []
    return None


def _exported(tree: ast.Module) -> set[str]:
    return {alias.asname or alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names}


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name


def _registered(node: ast.ClassDef) -> list[str]:
    """Names that ``create_weights`` registers."""
    create = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "create_weights"]
    calls = [n for c in create for n in ast.walk(c) if isinstance(n, ast.Call)]
    given = [c.args[0] for c in calls if getattr(c.func, "attr", "") == "register_parameter"]
    return sorted({_text(name) for name in given})


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def _selectors(sources: Sources) -> Iterator[tuple[str, list[str]]]:
    for name, tree in sources.items():
        if not name.startswith(_ORACLES):
            continue
        enums = [node for node in _classes(tree) if any("Enum" in ast.unparse(base) for base in node.bases)]
        members = sorted(member for enum in enums for member in _attributes(enum) if member.isupper())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("select_"):
                yield node.name, members


def _order(node: Any, names: tuple[str, ...]) -> list[str]:
    """Which of ``names`` occur in a function, in the order of the source, without repeats in a row."""
    found = []
    for n in ast.walk(node) if node is not None else ():
        name = n.attr if isinstance(n, ast.Attribute) else n.id if isinstance(n, ast.Name) else ""
        if name in names:
            found.append((n.lineno, n.col_offset, name))
    order = [name for _, _, name in sorted(found)]
    return [name for at, name in enumerate(order) if not at or order[at - 1] != name]


def read_wheel(path: Path) -> dict[str, ast.Module]:
    """The parsed Python files of a wheel."""
    wanted = ("vllm/model_executor/layers/", "vllm/model_executor/model_loader/reload/", "vllm/config/")
    with zipfile.ZipFile(path) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".py") and n.startswith(wanted)]
        return {name: ast.parse(wheel.read(name)) for name in names}


def download(version: str, directory: Path) -> Path:
    """Download a wheel of vLLM, the newest for ""."""
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 31, 34, 35)]
    wanted = f"vllm=={version}" if version else "vllm"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version=3.12", *platforms, "--dest", str(directory), wanted]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    return next(directory.glob("vllm-*.whl"))


def main() -> int:
    """Write or check the table."""
    table = {}
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as directory:
            wheel = download(version, Path(directory))
            table[wheel.name.split("-")[1]] = contract(read_wheel(wheel))
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    if "--check" not in sys.argv:
        TABLE.write_text(text)
    elif text != TABLE.read_text():
        print(f"{TABLE} is not what the wheels say: run {__file__}, and look at the difference", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
