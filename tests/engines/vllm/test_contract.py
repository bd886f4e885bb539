"""The names of vLLM that the plug-in uses, in the sources of the oldest version, of one between, and of the newest.

They were parsed, not run: ``contract.json`` is what ``tests/support/engine_contract.py`` read in the wheels.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from polymoe.engines.serving.hooks import Hook
from polymoe.engines.serving.sources import VLLM
from polymoe.engines.vllm.hooks import HOOKS
from polymoe.engines.vllm.neutral import _PLAIN, _SELECTORS
from support.engine_contract import ENGINES

CONTRACT: dict[str, dict[str, Any]] = json.loads(ENGINES["vllm"].table.read_text())


def test_the_table_has_the_oldest_and_a_newer_version() -> None:
    versions = [tuple(map(int, version.split(".")[:2])) for version in CONTRACT]
    assert min(versions) == (0, 24)
    assert max(versions) >= (0, 33)


@pytest.mark.parametrize("hook", HOOKS, ids=str)
@pytest.mark.parametrize("version", CONTRACT)
def test_every_hook_exists(version: str, hook: Hook) -> None:
    found = CONTRACT[version]["hooks"][str(hook)]
    assert found is not None, f"vLLM {version} has no {hook}"
    assert set(hook.uses) <= set(found)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if "self" in hook.uses], ids=str)
def test_methods_that_we_replace_have_the_same_parameters_in_every_version(hook: Hook) -> None:
    found = {version: tuple(table["hooks"][str(hook)]) for version, table in CONTRACT.items()}
    assert set(found.values()) == {hook.uses}, found


@pytest.mark.parametrize("version", CONTRACT)
def test_the_layer_asks_its_method_in_this_order(version: str) -> None:
    order = CONTRACT[version]["order"]["RoutedExperts.__init__"]
    first = [order.index(name) for name in ("_get_quant_method", "maybe_roundup_sizes", "supports_eplb")]
    assert first == sorted(first)
    assert order[-1] == "create_weights"


@pytest.mark.parametrize("version", CONTRACT)
def test_the_number_of_elements_is_compared_after_our_loader_was_called(version: str) -> None:
    """Our loader, which ``get_numel_loaded`` calls, says by ``load_numel_total`` whether the layer is complete."""
    order = CONTRACT[version]["order"]["make_online_process_loader"]
    called = order.index("get_numel_loaded")
    assert order[-1] == "_layerwise_process"
    assert "load_numel_total" in order[called:]
    assert order[called:].index("load_numel") < order[called:].index("load_numel_total")


@pytest.mark.parametrize("method", VLLM)
def test_methods_create_the_tensors_that_are_read(method: str) -> None:
    found = {version: table["methods"][method] for version, table in CONTRACT.items() if method in table["methods"]}
    assert found, f"no version has {method}"
    for version, names in found.items():
        assert any(
            all(_created(f"{p}_{s}", names) for p in ("w13", "w2") for s in dialect.required)
            for dialect in VLLM[method].dialects
        ), (version, names)


def _created(name: str, names: list[str]) -> bool:
    return any(name == other or ("{}" in other and name.startswith(other.partition("{}")[0])) for other in names)


@pytest.mark.parametrize("version", CONTRACT)
def test_functions_that_choose_a_backend_have_a_plain_answer(version: str) -> None:
    selectors = CONTRACT[version]["selectors"]
    for name in _SELECTORS:
        assert set(_PLAIN) & set(selectors[name]), (version, name)
