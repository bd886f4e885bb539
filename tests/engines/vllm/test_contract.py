"""What vLLM does when a layer is made and loaded, in the sources of several versions; its names have their own test.

They were parsed, not run: ``contract.json`` is what ``tests/support/engine_contract.py`` read in the wheels.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import polymoe
from polymoe.engines.hooks import Hook
from polymoe.engines.vllm.hooks import DEEPEP_HOOKS, MODULAR_HOOKS, SELECTORS
from polymoe.engines.vllm.neutral import _PLAIN
from support.engine_contract import ENGINES

CONTRACT: dict[str, dict[str, Any]] = json.loads(ENGINES["vllm"].table.read_text())


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


@pytest.mark.parametrize("version", CONTRACT)
def test_functions_that_choose_a_backend_have_a_plain_answer(version: str) -> None:
    selectors = CONTRACT[version]["selectors"]
    for hook in SELECTORS:
        assert set(_PLAIN) & set(selectors[hook.name]), (version, hook)


@pytest.mark.parametrize("version", CONTRACT)
def test_vllms_own_kernels_are_not_asked_for(version: str) -> None:
    """Of the functions that make one, ours is the first that a version calls, if it has them."""
    path = Path(polymoe.__file__).parent / "engines" / "vllm" / "method.py"
    (ours,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "PackedMethod")
    theirs = next(attributes for name, attributes in CONTRACT[version]["hooks"].items() if name.endswith("MethodBase"))
    makers = {"maybe_make_prepare_finalize", "select_gemm_impl"} & set(theirs)
    assert makers in (set(), {"maybe_make_prepare_finalize", "select_gemm_impl"})
    defined = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)}
    assert not makers or "maybe_make_prepare_finalize" in defined


@pytest.mark.parametrize("version", CONTRACT)
@pytest.mark.parametrize("hook", DEEPEP_HOOKS, ids=str)
def test_deepep_has_the_parameters_of_what_needs_no_package(version: str, hook: Hook) -> None:
    """It was never run: what is proven is that vLLM calls it as it calls what was run."""
    found = CONTRACT[version]["hooks"]
    step = hook.name.split(".")[1].removesuffix("_async")
    (modular,) = [h for h in MODULAR_HOOKS if h.name == f"FusedMoEPrepareAndFinalizeModular.{step}"]
    assert found[hook.path] == found[modular.path]
