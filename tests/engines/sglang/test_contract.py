"""The names of SGLang that the plug-in uses, in the sources of the oldest version that works and of the newest.

They were parsed, not run: ``contract.json`` is what ``tests/support/engine_contract.py`` read in the wheels.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from polymoe.engines.serving.hooks import Hook
from polymoe.engines.serving.sources import SGLANG
from polymoe.engines.sglang.hooks import ASKED_SERVER_ARGS, HOOKS, LAYER_ATTRIBUTES, UPDATES
from support.engine_contract import ENGINES

CONTRACT: dict[str, dict[str, Any]] = json.loads(ENGINES["sglang"].table.read_text())


def test_the_table_has_the_oldest_and_a_newer_version() -> None:
    versions = [tuple(map(int, version.split("."))) for version in CONTRACT]
    assert min(versions) == (0, 5, 17)
    assert max(versions) >= (0, 5, 23)


@pytest.mark.parametrize("hook", HOOKS, ids=str)
@pytest.mark.parametrize("version", CONTRACT)
def test_every_hook_exists(version: str, hook: Hook) -> None:
    found = CONTRACT[version]["hooks"][str(hook)]
    assert found is not None, f"SGLang {version} has no {hook}"
    assert set(hook.uses) <= set(found)


@pytest.mark.parametrize("name", ["create_moe_runner", "apply", "process_weights_after_loading"])
def test_methods_that_we_replace_have_the_same_parameters_in_every_version(name: str) -> None:
    (hook,) = [hook for hook in HOOKS if hook.name.endswith(f"MethodBase.{name}")]
    found = {version: tuple(table["hooks"][str(hook)]) for version, table in CONTRACT.items()}
    assert set(found.values()) == {hook.uses}, found


@pytest.mark.parametrize("version", CONTRACT)
def test_the_layer_sets_what_we_read(version: str) -> None:
    assert set(LAYER_ATTRIBUTES) <= set(CONTRACT[version]["layer"])


@pytest.mark.parametrize("version", CONTRACT)
def test_the_server_has_the_arguments_that_keep_a_layer(version: str) -> None:
    found = CONTRACT[version]["server"]
    assert {*ASKED_SERVER_ARGS, "moe_runner_backend", "load_format", "disaggregation_mode"} <= set(found)
    assert {"enable_paged_experts", "torchao_config"} & set(found)


@pytest.mark.parametrize("version", CONTRACT)
def test_the_layer_does_in_this_order(version: str) -> None:
    """The config is there when the method is chosen; the dispatcher and the rule for scales come after it."""
    assert CONTRACT[version]["order"] == [
        "moe_runner_config", "get_quant_method", "create_weights", "create_moe_runner", "create_moe_dispatcher",
        "should_fuse_routed_scaling_factor_in_topk",
    ]  # fmt: skip


def test_only_the_newer_version_tells_a_topk_its_backend() -> None:
    assert [table["topk"] for table in CONTRACT.values()] == [False, True]


@pytest.mark.parametrize("version", CONTRACT)
def test_every_update_of_weights_asks_whether_it_may(version: str) -> None:
    """From disk, from a group, from tensors and through IPC."""
    assert CONTRACT[version]["hooks"][UPDATES] is not None
    assert CONTRACT[version]["updates"] == 4


@pytest.mark.parametrize("method", SGLANG)
def test_methods_create_the_tensors_that_are_read(method: str) -> None:
    found = {version: table["methods"][method] for version, table in CONTRACT.items() if method in table["methods"]}
    assert found, f"no version has {method}"
    for version, names in found.items():
        assert any(
            {f"{p}_{s}" for p in ("w13", "w2") for s in dialect.required} <= set(names)
            for dialect in SGLANG[method].dialects
        ), (version, names)
        biases = [name for name in names if name.endswith("bias")]
        assert set(biases) <= {f"{p}_{SGLANG[method].bias}" for p in ("w13", "w2")}
