"""The names of each engine that its plug-in uses, in the sources of the oldest version that works and of newer ones.

They were parsed, not run: the tables are what ``tests/support/engine_contract.py`` read in the wheels. What one engine
does alone is in the tests of that engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from polymoe.engines.hooks import Hook
from polymoe.engines.serving.sources import SGLANG, VLLM, StackedSource
from polymoe.engines.sglang.hooks import HOOKS as SGLANG_HOOKS
from polymoe.engines.vllm.hooks import BALANCE_HOOKS, DEEPEP_HOOKS, MODULAR_HOOKS, RUN_HOOK
from polymoe.engines.vllm.hooks import HOOKS as VLLM_HOOKS
from support.engine_contract import ENGINES

TABLES: dict[str, dict[str, Any]] = {name: json.loads(e.table.read_text()) for name, e in ENGINES.items()}
HOOKS = {"vllm": (*VLLM_HOOKS, *MODULAR_HOOKS, *DEEPEP_HOOKS, *BALANCE_HOOKS, RUN_HOOK), "sglang": SGLANG_HOOKS}
SOURCES: Mapping[str, Mapping[str, StackedSource]] = {"vllm": VLLM, "sglang": SGLANG}


@pytest.mark.parametrize(
    ("engine", "oldest", "newest"), [("vllm", (0, 24, 0), (0, 33, 0)), ("sglang", (0, 5, 17), (0, 5, 23))]
)
def test_the_table_has_the_oldest_and_a_newer_version(
    engine: str, oldest: tuple[int, ...], newest: tuple[int, ...]
) -> None:
    versions = [tuple(map(int, version.split("."))) for version in TABLES[engine]]
    assert min(versions) == oldest
    assert max(versions) >= newest


@pytest.mark.parametrize(
    ("engine", "version", "hook"),
    [(engine, version, hook) for engine, table in TABLES.items() for version in table for hook in HOOKS[engine]],
    ids=str,
)
def test_every_hook_exists(engine: str, version: str, hook: Hook) -> None:
    found = TABLES[engine][version]["hooks"][hook.path]
    assert found is not None, f"{engine} {version} has no {hook}"
    assert set(hook.uses) <= set(found)


REPLACED = [
    *(("vllm", hook) for hook in VLLM_HOOKS if "self" in hook.uses),
    *(
        ("sglang", hook)
        for hook in SGLANG_HOOKS
        if hook.name.endswith(("Base.create_moe_runner", "Base.apply", "Base.process_weights_after_loading"))
    ),
]


@pytest.mark.parametrize(("engine", "hook"), REPLACED, ids=str)
def test_methods_that_we_replace_have_the_same_parameters_in_every_version(engine: str, hook: Hook) -> None:
    found = {version: tuple(table["hooks"][hook.path]) for version, table in TABLES[engine].items()}
    assert set(found.values()) == {hook.uses}, found


@pytest.mark.parametrize(
    ("engine", "method"), [(engine, method) for engine, methods in SOURCES.items() for method in methods]
)
def test_methods_create_the_tensors_that_are_read(engine: str, method: str) -> None:
    tables, source = TABLES[engine], SOURCES[engine][method]
    found = {version: table["methods"][method] for version, table in tables.items() if method in table["methods"]}
    assert found, f"no version has {method}"
    for version, names in found.items():
        assert any(
            all(_created(f"{p}_{s}", names) for p in ("w13", "w2") for s in dialect.required)
            for dialect in source.dialects
        ), (version, names)
        biases = [name for name in names if name.endswith("bias")]
        assert set(biases) <= {f"{p}_{source.bias}" for p in ("w13", "w2")}


def _created(name: str, names: list[str]) -> bool:
    """Whether a name is among those in a source, where some end with what only a run knows."""
    return any(name == other or ("{}" in other and name.startswith(other.partition("{}")[0])) for other in names)
