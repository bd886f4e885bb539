"""The direction of imports, as docs/structure.md draws it; and that importing polymoe stays light."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import polymoe

ROOT = Path(polymoe.__file__).parent

ENGINES = {"transformers", "vllm", "sglang", "triton", "flashinfer"}


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    return ".".join(("polymoe", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@cache
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


MODULES = {module_name(path): path for path in FILES}


def used_modules(path: Path) -> set[str]:
    """Modules of polymoe that a file imports, inside functions too."""
    used = set()
    for name, _ in imports(path):
        while name.startswith("polymoe.") and name not in MODULES:
            name = name.rpartition(".")[0]
        used.add(name)
    return used & set(MODULES)


def parts_in_order() -> list[str]:
    """The parts of the package in the order of the first table of docs/structure.md."""
    text = (ROOT.parents[1] / "docs" / "structure.md").read_text(encoding="utf-8")
    table = text[: text.index("## ")]
    return list(dict.fromkeys(re.findall(r"^\| `(\w+)(?:/|\.py)", table, re.MULTILINE)))


def test_the_map_lists_every_part() -> None:
    assert sorted(parts_in_order()) == sorted({part(path) for path in FILES} - {"__main__"})


def test_no_part_imports_one_below_it() -> None:
    order = [*parts_in_order(), "__main__"]
    for path in FILES:
        above = order[: order.index(part(path)) + 1]
        used = {part(MODULES[name]) for name in used_modules(path)}
        assert used <= set(above), f"{path.relative_to(ROOT)} imports {sorted(used - set(above))}"


def test_no_circle_of_modules() -> None:
    """Each module can be put after all that it imports; a package's ``__init__`` after those it names."""
    waiting = {name: used_modules(path) - {name} for name, path in MODULES.items()}
    while free := {name for name, used in waiting.items() if not used & set(waiting)}:
        waiting = {name: used for name, used in waiting.items() if name not in free}
    assert not waiting, f"import each other, or what does: {sorted(waiting)}"


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("kernels", set()),  # device code and its launchers
        ("bench/serving", {"errors", "common", "bench"}),
    ],
)
def test_what_needs_nothing_else(folder: str, others: set[str]) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        used = {MODULES[name] for name in used_modules(path)}
        assert {part(file) for file in used if ROOT / folder not in file.parents} <= others, path


@pytest.mark.parametrize(("engine", "others"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_an_engines_adapter_imports_no_other(engine: str, others: str) -> None:
    for path in (ROOT / "engines" / engine).glob("*.py"):
        assert not [name for name in used_modules(path) if name.startswith(f"polymoe.engines.{others}")], path


def test_engines_and_kernel_libraries_are_imported_only_where_they_belong() -> None:
    for path in FILES:
        where = part(path) in {"engines", "serve", "kernels"}
        if not (where or ROOT / "checkpoint/architectures" in path.parents):
            eager = {name.split(".")[0] for name, at_import in imports(path) if at_import}
            assert not eager & ENGINES, path


def test_public_names_are_sorted_and_resolve() -> None:
    assert polymoe.__all__ == sorted(polymoe.__all__)
    assert {name for name in polymoe.__all__ if getattr(polymoe, name) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = polymoe.nonsense


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _least_processor_seconds(code: str) -> float:
    """The least of three, since caches shared with other programs make a process slower, never faster."""

    def seconds() -> float:
        before = os.times()
        _python(code)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    return min(seconds() for _ in range(3))


def test_importing_polymoe_is_light() -> None:
    heavy = ("torch", "triton", "transformers", "numpy", "rich", "typer", "safetensors")
    code = f"import sys, polymoe; print([m for m in {heavy!r} if m in sys.modules])"
    assert _python(code) == "[]"
    assert _least_processor_seconds("import polymoe") < _least_processor_seconds("pass") + 0.15


def test_explain_and_models_answer_from_sizes_without_loading_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from polymoe.__main__ import main; sys.argv = ['polymoe', {}]\n"
        "try: main()\n"
        "finally: print([m for m in ('torch._C', 'huggingface_hub.hf_api') if m in sys.modules], file=sys.stderr)"
    )
    explain = ("explain", "openai/gpt-oss-20b", "--device", "h200")
    for command in ((*explain, "--json"), ("models", "--device", "rtx4090")):
        script = code.format(", ".join(map(repr, command)))
        env = {**os.environ, "HF_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=env)
        assert done.stdout
        assert done.stderr.splitlines()[-1] == "[]"
    # 0.8 s beside torch's 2.9 on an idle processor. Other programs stretch both.
    whole = code.format(", ".join(map(repr, explain)))
    assert _least_processor_seconds(whole) < 0.6 * _least_processor_seconds("import torch")


def test_the_first_use_of_a_postponed_torch_loads_it() -> None:
    code = (
        "import sys; from polymoe.common.lazy_torch import postpone_torch; postpone_torch(); import torch; "
        "first = 'torch._C' in sys.modules; {}; print(first, 'torch._C' in sys.modules, type(torch).__name__)"
    )
    for use in ("from torch import Tensor", "import torch.nn.functional as F; F.relu"):
        assert _python(code.format(use)) == "False True module", use


def test_the_core_loads_neither_triton_nor_an_engine() -> None:
    code = (
        "import sys, polymoe; polymoe.explain, polymoe.load_experts, polymoe.formats; "
        "print([m for m in ('triton', 'transformers', 'vllm', 'sglang') if m in sys.modules])"
    )
    assert _python(code) == "[]"


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    # The same thing in two kernel packages, which import nothing.
    del places["Permutation"]
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
