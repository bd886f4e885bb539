"""The direction of imports, as docs/structure.md draws it; and that importing polymoe stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import polymoe

ROOT = Path(polymoe.__file__).parent

# Each room may import the rooms named, and itself.
_LEAVES = {"backend_names", "errors", "environment", "shapes", "verdict"}
_VALUES = _LEAVES | {"machine", "activations", "routing", "formats", "numerics"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "backend_names": {"errors"},
    "environment": set(),
    "shapes": set(),
    "verdict": set(),
    "numerics": set(),
    "machine": {"errors", "shapes"},
    "activations": {"errors", "shapes"},
    "routing": {"errors", "shapes"},
    "formats": {"errors", "shapes"},
    "kernels": set(),
    "tensors": {"errors", "shapes", "formats", "activations"},
}
ALLOWED["problem"] = ALLOWED["tensors"] | {"tensors"}
ALLOWED["cost"] = {"machine", "problem"}
ALLOWED["layouts"] = ALLOWED["tensors"] | {"tensors", "verdict"}
ALLOWED["checkpoint"] = ALLOWED["problem"] | {"problem", "routing"}
ALLOWED["backends"] = _VALUES | {"tensors", "layouts", "problem", "cost", "kernels"}
ALLOWED["planning"] = ALLOWED["backends"] - {"kernels"} | {"backends"}
ALLOWED["runtime"] = ALLOWED["planning"] | {"planning"}
ALLOWED["experts"] = ALLOWED["runtime"] | {"runtime", "checkpoint"}
ALLOWED["explanation"] = ALLOWED["experts"] | {"experts"}
_CORE = ALLOWED["explanation"] | {"explanation"}
ALLOWED["verify"] = ALLOWED["engines"] = set(_CORE)
ALLOWED["bench"] = ALLOWED["generate"] = ALLOWED["evaluate"] = ALLOWED["serve"] = _CORE | {"engines"}  # whole models
ALLOWED["cli"] = _CORE | {"bench", "engines", "serve", "generate", "evaluate", "verify"}
ALLOWED["__main__"] = {"cli"}

ENGINES = {"transformers", "vllm", "sglang", "triton", "flashinfer"}


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute names imported anywhere in the file, and whether at import time (not inside a function)."""
    tree = ast.parse(path.read_text())
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)
    }
    typing = {
        id(n)
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.dump(i.test)
        for n in ast.walk(i)
    }
    found = []
    for node in ast.walk(tree):
        eager = id(node) not in inside and id(node) not in typing
        if isinstance(node, ast.Import):
            found += [(alias.name, eager) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(f"{node.module}.{alias.name}", eager) for alias in node.names]
    return found


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    allowed = ALLOWED[part(path)] | {part(path)}
    used = {name.split(".")[1] for name, _ in imports(path) if name.startswith("polymoe.")} - {"__version__"}
    assert used <= allowed, f"{path.relative_to(ROOT)} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_engines_and_kernel_libraries_are_imported_only_where_they_belong(path: Path) -> None:
    if part(path) in {"engines", "serve", "kernels", "evaluate"}:
        return
    eager = {name.split(".")[0] for name, at_import in imports(path) if at_import}
    assert not eager & ENGINES


def test_every_part_has_a_rule_and_every_rule_a_place() -> None:
    parts = {part(p) for p in FILES}
    assert parts <= ALLOWED.keys()


def test_files_stay_readable() -> None:
    limits = {p: 600 if part(p) == "kernels" else 400 for p in FILES}
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > limits[p]}
    assert not long


def test_public_names_are_sorted_and_resolve() -> None:
    assert polymoe.__all__ == sorted(polymoe.__all__)
    assert {name for name in polymoe.__all__ if getattr(polymoe, name) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = polymoe.nonsense


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_polymoe_is_light() -> None:
    heavy = ("torch", "triton", "transformers", "numpy", "rich", "typer", "safetensors")
    code = f"import sys, polymoe; print([m for m in {heavy!r} if m in sys.modules])"
    assert _python(code) == "[]"
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        _python("import polymoe")
        with_polymoe = time.perf_counter() - start
        start = time.perf_counter()
        _python("pass")
        best = min(best, with_polymoe - (time.perf_counter() - start))
    assert best < 0.15, f"importing polymoe takes {best:.3f} s"


def test_the_core_loads_neither_triton_nor_an_engine() -> None:
    code = (
        "import sys, polymoe; polymoe.explain, polymoe.load_experts, polymoe.formats; "
        "print([m for m in ('triton', 'transformers', 'vllm', 'sglang') if m in sys.modules])"
    )
    assert _python(code) == "[]"
