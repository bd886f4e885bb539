"""The direction of imports, as docs/structure.md draws it; and that importing polymoe stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polymoe

ROOT = Path(polymoe.__file__).parent

# A room is a package, or a module that is in none. Each may import the rooms named, and itself. A package inside
# another is a room of its own: above it, `backends` is allowed and `backends.cuda` is not.
_LEAVES = {
    "atomic",
    "backend_names",
    "errors",
    "environment",
    "install_command",
    "json_input",
    "plugins",
    "shapes",
    "units",
    "verdict",
}
_VALUES = _LEAVES | {"machine", "activations", "routing", "formats", "numerics"}
ALLOWED: dict[str, set[str]] = {
    "atomic": set(),
    "errors": set(),
    "backend_names": {"errors"},
    "environment": set(),
    "install_command": set(),
    "json_input": set(),
    "server_replies": {"json_input"},
    "plugins": set(),
    "shapes": set(),
    "units": set(),
    "verdict": set(),
    "numerics": set(),
    "machine": {"environment", "errors", "shapes"},
    "activations": {"errors", "shapes"},
    "routing": {"errors", "shapes"},
    "formats": {"errors", "shapes"},
    "kernels.cuda": set(),
    "kernels.cuda.launch": {"kernels.cuda"},
    "kernels.triton": set(),
    "tensors": {"errors", "shapes", "formats", "activations"},
}
ALLOWED["scale_range"] = {"formats", "tensors"}
ALLOWED["activation_quantization"] = {"errors", "shapes", "formats", "numerics"}
ALLOWED["problem"] = ALLOWED["tensors"] | {"tensors", "activation_quantization", "scale_range"}
ALLOWED["cost"] = {"machine", "problem"}
ALLOWED["layouts.cuda"] = ALLOWED["tensors"] | {"tensors", "scale_range", "verdict", "layouts"}
ALLOWED["layouts"] = ALLOWED["layouts.cuda"] | {"layouts.cuda", "plugins"}
ALLOWED["checkpoint"] = ALLOWED["problem"] | {"problem", "routing", "json_input", "units", "checkpoint.dialects"}
ALLOWED["checkpoint.dialects"] = ALLOWED["checkpoint"] | {"checkpoint"}
_BACKENDS = _VALUES | {"activation_quantization", "scale_range", "tensors", "layouts", "problem", "cost", "backends"}
ALLOWED["backends"] = _BACKENDS | {"backends.cuda", "backends.flashinfer", "backends.humming", "backends.triton"}
ALLOWED["backends.cuda"] = _BACKENDS | {"kernels.cuda", "kernels.cuda.launch"}
ALLOWED["backends.flashinfer"] = set(_BACKENDS)
ALLOWED["backends.humming"] = _BACKENDS | {"backends.triton", "kernels.triton"}
ALLOWED["backends.triton"] = _BACKENDS | {"kernels.triton"}
ALLOWED["planning"] = set(_BACKENDS)
ALLOWED["call"] = ALLOWED["problem"] | {"problem"}
ALLOWED["runtime"] = ALLOWED["planning"] | {"planning", "call"}
ALLOWED["load_check"] = ALLOWED["runtime"] | {"runtime"}
ALLOWED["experts"] = ALLOWED["load_check"] | {"load_check", "checkpoint"}
ALLOWED["explanation"] = ALLOWED["experts"] | {"experts"}
_CORE = ALLOWED["explanation"] | {"explanation"}
ALLOWED["engines"] = set()
ALLOWED["verify"] = set(_CORE)
ALLOWED["engines.transformers"] = _CORE | {"engines"}
ALLOWED["engines.serving"] = _CORE | {"checkpoint.dialects"}
ALLOWED["diagnosis"] = ALLOWED["runtime"] | {"engines.serving"}
ALLOWED["engines.sglang"] = _CORE | {"engines.serving"}
ALLOWED["engines.vllm"] = _CORE | {"engines.serving"}
ALLOWED["generate"] = ALLOWED["serve"] = _CORE | {"engines.transformers"}  # whole models
ALLOWED["bench"] = ALLOWED["generate"] | {"bench.peers"}
ALLOWED["bench.peers"] = _CORE | {"bench", "kernels.triton"}
ALLOWED["evaluate"] = {"atomic", "errors", "install_command", "json_input", "server_replies"}
ALLOWED["bench.serving"] = ALLOWED["evaluate"] | {"bench"}  # nothing that loads a model
ALLOWED["cli"] = _CORE | {"bench", "bench.serving", "serve", "generate", "evaluate", "verify"}
ALLOWED["cli"] |= {"diagnosis", "engines.serving", "engines.transformers"}
ALLOWED["__main__"] = {"cli"}

ENGINES = {"transformers", "vllm", "sglang", "triton", "flashinfer"}


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def room(path: Path) -> str:
    where = path.relative_to(ROOT)
    return ".".join(where.parent.parts) or where.stem


def room_of_name(name: str) -> str:
    """The room that ``polymoe.a.b.c`` is imported from; names of ``polymoe`` itself are none."""
    parts = name.split(".")[1:]
    if not (ROOT / parts[0]).is_dir():
        return parts[0]
    packages = [n for n in range(1, len(parts) + 1) if ROOT.joinpath(*parts[:n]).is_dir()]
    return ".".join(parts[: packages[-1]])


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
    allowed = ALLOWED[room(path)] | {room(path)}
    used = {room_of_name(name) for name, _ in imports(path) if name.startswith("polymoe.")} - {"__version__"}
    assert used <= allowed, f"{path.relative_to(ROOT)} imports {sorted(used - allowed)}"


# Modules of a package, each of which imports only from those before it.
ORDER = {
    "serve": (
        "errors", "settings", "in_flight", "metrics", "limits", "strict_json", "requests", "sampling", "choices",
        "answers", "call_queue", "sequential", "shared_sampling", "continuous_batching", "generation", "messages",
        "prompts", "openapi", "profiling", "app", "gate", "http_parser", "connections", "log_limit", "http_server",
        "listener", "activity", "summary", "lifecycle", "__init__",
    ),
    "engines.transformers": (
        "contract", "untrusted", "chat_template", "replies", "model_config", "tokenizer", "paged_attention",
        "decode_graph", "families", "experts_interface", "dense_quantizer", "weights", "quantizer", "dequantized",
        "transformers_packed", "loading", "generator", "chat", "__init__",
    ),
    "engines.serving": (
        "settings", "hooks", "sources", "loading", "dummy", "stand_aside", "preview", "packed_layer",
        "warm_up", "log", "take_over", "chooser", "__init__",
    ),
    "engines.sglang": ("hooks", "facts", "method", "plugin", "__init__"),
    "engines.vllm": ("hooks", "neutral", "facts", "modular", "method", "plugin", "__init__"),
}  # fmt: skip


@pytest.mark.parametrize("package", ORDER)
def test_a_package_has_one_direction(package: str) -> None:
    order = ORDER[package]
    paths = {p.stem: p for p in ROOT.joinpath(*package.split(".")).glob("*.py")}
    assert set(order) == set(paths)
    for place, name in enumerate(order):
        inside = [
            used.removeprefix(f"polymoe.{package}.").split(".")[0]
            for used, _ in imports(paths[name])
            if used.startswith(f"polymoe.{package}.")
        ]
        later = set(inside) & set(order[place:])
        assert not later, f"{package}/{name}.py imports {sorted(later)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_engines_and_kernel_libraries_are_imported_only_where_they_belong(path: Path) -> None:
    if part(path) in {"engines", "serve", "kernels", "evaluate"}:
        return
    eager = {name.split(".")[0] for name, at_import in imports(path) if at_import}
    assert not eager & ENGINES


def test_every_module_has_a_room_and_every_room_a_module() -> None:
    """A new module belongs to a room of the table above, or is a new row in it and in docs/structure.md."""
    assert {room(path) for path in FILES} == set(ALLOWED)


def test_rooms_import_only_rooms_before_them() -> None:
    """The table itself goes one way, but for packages and those inside them."""
    seen: set[str] = set()
    for name, allowed in ALLOWED.items():
        later = {other for other in allowed - seen if other.split(".")[0] != name.split(".")[0]}
        assert not later, f"{name} may import {sorted(later)}, which come after it"
        seen.add(name)
    assert all(allowed <= set(ALLOWED) for allowed in ALLOWED.values())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("polymoe.errors", "errors"),
        ("polymoe.errors.PlanError", "errors"),
        ("polymoe.backends.BACKENDS", "backends"),
        ("polymoe.backends.base.Backend", "backends"),
        ("polymoe.backends.cuda", "backends.cuda"),
        ("polymoe.backends.cuda.backend.Cuda", "backends.cuda"),
        ("polymoe.FusedExperts", "FusedExperts"),
    ],
)
def test_rooms_of_names(name: str, found: str) -> None:
    assert room_of_name(name) == found


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


def _processor_seconds(code: str) -> float:
    before = os.times()
    _python(code)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_importing_polymoe_is_light() -> None:
    heavy = ("torch", "triton", "transformers", "numpy", "rich", "typer", "safetensors")
    code = f"import sys, polymoe; print([m for m in {heavy!r} if m in sys.modules])"
    assert _python(code) == "[]"
    # Processor time, which other programs on this machine hardly change, and the least of five all the less.
    seconds = {code: min(_processor_seconds(code) for _ in range(5)) for code in ("import polymoe", "pass")}
    assert seconds["import polymoe"] - seconds["pass"] < 0.15


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
