"""What the sources of vLLM and SGLang say of the names that the plug-ins use: ``tests/engines/*/contract.json``.

``python tests/support/engine_contract.py`` downloads wheels of the oldest version that works, of one between and of the
newest, reads their Python files without installing them, and writes the tables. With ``--check`` it changes nothing,
and fails if a table differs.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymoe.engines.hooks import Hook
from polymoe.engines.serving.sources import SGLANG, VLLM
from polymoe.engines.sglang.hooks import ASKED_SERVER_ARGS
from polymoe.engines.sglang.hooks import HOOKS as SGLANG_HOOKS
from polymoe.engines.vllm.hooks import BALANCE_HOOKS, DEEPEP_HOOKS, MODULAR_HOOKS, RUN_HOOK
from polymoe.engines.vllm.hooks import HOOKS as VLLM_HOOKS

Sources = Mapping[str, ast.Module]


@dataclass(frozen=True)
class Engine:
    """An engine whose wheels are read.

    Attributes:
        name: of the distribution and of its package.
        versions: those that are read, "" for the newest.
        folders: where the Python files are that are read.
        contract: what one version has, by section.
    """

    name: str
    versions: tuple[str, ...]
    folders: tuple[str, ...]
    contract: Callable[[Sources], dict[str, Any]]

    @property
    def table(self) -> Path:
        """The committed table, by version."""
        return Path(__file__).parents[1] / "engines" / self.name / "contract.json"


_LAYERS = "vllm/model_executor/layers/"
_ORACLES = f"{_LAYERS}fused_moe/oracle/"
_CONSTRUCTION = ("_get_quant_method", "maybe_roundup_sizes", "supports_eplb", "create_weights")
_COUNTING = ("load_numel_total", "get_numel_loaded", "load_numel", "_layerwise_process")


def _vllm(sources: Sources) -> dict[str, Any]:
    """What one version of vLLM has.

    Returns:
        ``hooks``: parameters of functions and attributes of classes; ``methods``: names of the parameters that each
        method of :data:`~polymoe.engines.serving.sources.VLLM` creates, ``{}`` for computed parts; ``selectors``: the
        functions that choose backends, and their enumerations; ``order``: what ``RoutedExperts.__init__`` asks its
        method for, and what counts the loaded elements, in the order of the source.
    """
    created = _find(sources, f"{_LAYERS}fused_moe/routed_experts.py", "RoutedExperts.__init__")
    loaded = _find(sources, "vllm/model_executor/model_loader/reload/layerwise.py", "make_online_process_loader")
    return {
        "hooks": {
            hook.path: _hook(sources, hook)
            for hook in (*VLLM_HOOKS, *MODULAR_HOOKS, *DEEPEP_HOOKS, *BALANCE_HOOKS, RUN_HOOK)
        },
        "methods": _methods(sources, _LAYERS, VLLM),
        "selectors": dict(sorted(_selectors(sources))),
        "order": {
            "RoutedExperts.__init__": _order(created, _CONSTRUCTION),
            "make_online_process_loader": _order(loaded, _COUNTING),
        },
    }


_SRT = "sglang/srt/"
_FUSED_MOE = f"{_SRT}layers/moe/fused_moe_triton/layer.py"
_CHOICE = (
    "moe_runner_config", "get_quant_method", "create_weights", "create_moe_runner", "create_moe_dispatcher",
    "should_fuse_routed_scaling_factor_in_topk",
)  # fmt: skip


def _sglang(sources: Sources) -> dict[str, Any]:
    """What one version of SGLang has.

    Returns:
        ``hooks`` and ``methods``: as of vLLM; ``layer``: what ``FusedMoE.__init__`` sets; ``server``: the arguments of
        the server that the plug-in asks for; ``order``: what ``FusedMoE.__init__`` does, in the order of the source;
        ``topk``: whether a TopK is told the backend of its layer; ``updates``: which functions that update weights call
        the model's loader, and which of them process the layers afterwards.
    """
    created = _find(sources, _FUSED_MOE, "FusedMoE.__init__")
    options = {
        name
        for file, tree in sources.items()
        if file == f"{_SRT}server_args.py" or file.startswith(f"{_SRT}arg_groups/fields/")
        for node in _classes(tree)
        for name in _attributes(node)
    }
    return {
        "hooks": {hook.path: _hook(sources, hook) for hook in SGLANG_HOOKS},
        "methods": _methods(sources, f"{_SRT}layers/quantization/", SGLANG),
        "layer": sorted(_assigned(created)),
        "server": sorted(options & {*ASKED_SERVER_ARGS, *_READ_SERVER_ARGS}),
        "order": list(dict.fromkeys(_order(created, _CHOICE))),
        "topk": _find(sources, f"{_SRT}layers/moe/topk.py", "TopK.bind_runner_backend") is not None,
        "updates": _updates(sources[f"{_SRT}model_executor/model_runner_components/weight_updater.py"]),
    }


def _updates(updater: ast.Module) -> dict[str, list[str]]:
    """Names of the functions of ``WeightUpdater`` that call a model's loader: one that processes the layers, or not."""
    (owner,) = (node for node in _classes(updater) if node.name == "WeightUpdater")
    functions = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    return {
        name: [f.name for f in functions if any(getattr(n, "attr", "") == name for n in ast.walk(f))]
        for name in ("load_weights", "load_weights_and_postprocess")
    }


_READ_SERVER_ARGS = (
    "disaggregation_mode", "enable_deterministic_inference", "enable_paged_experts", "load_format",
    "moe_runner_backend", "torchao_config",
)  # fmt: skip

ENGINES = {
    "vllm": Engine(
        "vllm",
        ("0.24.0", "0.26.0", ""),
        ("vllm/model_executor/layers/", "vllm/model_executor/model_loader/reload/", "vllm/config/",
            "vllm/distributed/eplb/eplb_state.py", "vllm/distributed/parallel_state.py",
            "vllm/v1/worker/worker_base.py",
        ),
        _vllm,
    ),
    "sglang": Engine(
        "sglang",
        ("0.5.17", ""),
        (
            f"{_SRT}arg_groups/fields/", f"{_SRT}distributed/parallel_state.py", f"{_SRT}layers/moe/",
            f"{_SRT}layers/quantization/", f"{_SRT}plugins/",
            f"{_SRT}model_executor/model_runner.py", f"{_SRT}model_executor/model_runner_components/",
            f"{_SRT}runtime_context.py", f"{_SRT}server_args.py",
        ),
        _sglang,
    ),
}  # fmt: skip


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


def _methods(sources: Sources, folder: str, names: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of the parameters that each of the classes called ``names`` creates, by the name of the class."""
    classes = {node.name: node for name, tree in sources.items() if name.startswith(folder) for node in _classes(tree)}
    return {name: sorted(_registered(name, classes)) for name in names if name in classes}


def _registered(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Names that the functions of a class called ``create_...`` register, or those of its bases if it has none."""
    node = classes[name]
    create = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name.startswith("create_")]
    calls = [n for c in create for n in ast.walk(c) if isinstance(n, ast.Call)]
    given = [c.args[0] for c in calls if getattr(c.func, "attr", "") == "register_parameter"]
    bases = [n for base in node.bases if (n := getattr(base, "id", "")) in classes]
    return {_text(name) for name in given} or {n for base in bases for n in _registered(base, classes)}


def _assigned(function: Any) -> set[str]:
    """Names of the attributes of ``self`` that a function sets."""
    targets = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in targets if getattr(n.value, "id", "") == "self"}


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


def read_wheel(path: Path, folders: tuple[str, ...]) -> dict[str, ast.Module]:
    """The parsed Python files of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".py") and n.startswith(folders)]
        return {name: ast.parse(wheel.read(name)) for name in names}


def download(name: str, version: str, directory: Path) -> Path:
    """Download a wheel, of the newest version for ""."""
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 31, 34, 35)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version=3.12", *platforms, "--dest", str(directory)]
    subprocess.run([*pip, f"{name}=={version}" if version else name], check=True, stdout=sys.stderr)
    return next(directory.glob(f"{name}-*.whl"))


def _lines(value: Any, indent: str = "") -> str:
    """JSON with a line for each name: what it has is on the same line, so that a difference names what changed."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    deeper = f"{indent} "
    rows = [f"{deeper}{json.dumps(name)}: {_lines(of, deeper)}" for name, of in sorted(value.items())]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def main() -> int:
    """Write or check the tables."""
    status = 0
    for engine in ENGINES.values():
        table = {}
        for version in engine.versions:
            with tempfile.TemporaryDirectory() as directory:
                wheel = download(engine.name, version, Path(directory))
                table[wheel.name.split("-")[1]] = engine.contract(read_wheel(wheel, engine.folders))
        text = _lines(table) + "\n"
        if "--check" not in sys.argv:
            engine.table.write_text(text)
        elif text != engine.table.read_text():
            print(
                f"{engine.table} is not what the wheels say: run {__file__}, and look at the difference",
                file=sys.stderr,
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
